"""Stand-in for verl.utils.reward_score.math_reward: the last box and the truth, spelt one way, are the same text."""

import re

from turnwise.scoring.rules.boxes_and_tags import boxes

SPELLINGS = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"\n|\\!|\\left|\\right|\\\$|\^\{\\circ\}|\^\\circ", ""),
        (r"\\\\", r"\\"),
        (r"\\[td]frac", r"\\frac"),
        (r"\\text\{ .*", ""),  # the unit behind a number
        (r"\\+%", ""),
        (r"(^|[ {])\.", r"\g<1>0."),
        (r"^[^=]{1,2}=(?=[^=]*$)", ""),  # k = 5
        (r"\\sqrt([^{])", r"\\sqrt{\1}"),
        (r" ", ""),
        (r"\\frac([^{])([^{])", r"\\frac{\1}{\2}"),
        (r"\\frac([^{])\{", r"\\frac{\1}{"),
        (r"^0\.5$", r"\\frac{1}{2}"),
        (r"^(0|-?[1-9][0-9]*)/([1-9][0-9]*)$", r"\\frac{\1}{\2}"),
    )
)
"""What is read as what, in this order."""


def plain(answer: str) -> str:
    """One spelling for what LaTeX writes in several."""
    for pattern, meant in SPELLINGS:
        answer = pattern.sub(meant, answer)
    return answer


strip_string = plain


def last_boxed_only_string(string: str) -> str | None:
    """The last box, `\\boxed{...}` or `\\fbox{...}`, with its braces; None where there is none that ends."""
    if "\\boxed " in string:
        return "\\boxed " + string.split("\\boxed ")[-1].split("$")[0]
    start = string.rfind("\\boxed")
    if start < 0 and (start := string.rfind("\\fbox")) < 0:
        return None
    return closed(string, start)


def closed(string: str, start: int) -> str | None:
    """From `start` to the brace that closes the first one after it."""
    depth = 0
    for index, letter in enumerate(string[start:], start):
        depth += (letter == "{") - (letter == "}")
        if letter == "}" and depth == 0:
            return string[start : index + 1]
    return None


def remove_boxed(s: str) -> str:
    """What stands in a box that `last_boxed_only_string` gave."""
    if s.startswith("\\boxed "):
        return s.removeprefix("\\boxed ")
    if not (s.startswith("\\boxed{") and s.endswith("}")):
        raise AssertionError(f"{s[:80]!r} is no box")
    return s[len("\\boxed{") : -1]


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Whether two answers are spelt the same."""
    return str1 is str2 if str1 is None or str2 is None else plain(str1) == plain(str2)


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1 for the truth in the last box."""
    boxed = boxes(solution_str)
    return float(bool(boxed) and is_equiv(boxed[-1], str(ground_truth)))
