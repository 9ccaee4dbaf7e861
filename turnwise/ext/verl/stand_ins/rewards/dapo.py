"""Stand-in for verl.utils.reward_score.math_dapo: the last `Answer:` line, or else the last box; right 1, wrong -1."""

import re
from typing import Any

from turnwise.ext.verl.stand_ins.rewards.math import closed, plain
from turnwise.scoring.rules.boxes_and_tags import boxes

TAIL, BOX_TAIL = 300, 100
"""As many last characters are read, for a line and for a box."""
NONE = "[INVALID]"
_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_WRAPPED = re.compile(r"\\(?:boxed|text|textbf|mbox|mathrm|overline)\{([^{}]*)\}")
_UNIT = re.compile(r"(?<=[0-9}])\s*[a-z]+(?: [a-z]+)*\.?$")
_THOUSANDS = re.compile(r"[0-9,]+")


def normalize_final_answer(final_answer: str) -> str:
    """What follows the last `=`, without dollars, units, wrappers and the commas of a whole number."""
    text = final_answer.rpartition("=")[2].strip()
    if (inside := re.search(r"\$(.*?)\$", text)) is not None:
        text = inside[1]
    text = plain(_UNIT.sub("", _WRAPPED.sub(r"\1", text.replace("$", "")).strip()))
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def last_boxed_only_string(string: str) -> str | None:
    """The last `\\boxed{...}` with its braces; None where there is none that ends."""
    start = string.rfind("\\boxed{")
    return None if start < 0 else closed(string, start)


def remove_boxed(s: str) -> str:
    """The text inside a \\boxed{}; AssertionError for anything else."""
    if not (s.startswith("\\boxed{") and s.endswith("}")):
        raise AssertionError(f"{s[:80]!r} is no box")
    return s[len("\\boxed{") : -1]


def compute_score(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> dict[str, Any]:
    """The score, 1 or -1, with `acc` and the prediction `pred`."""
    if pause_tokens_index is not None:
        raise NotImplementedError("pause_tokens_index is not read here: keep your own rule in your compute_score")
    tail, truth = solution_str[-TAIL:], str(ground_truth)
    lines, boxed = _LINE.findall(tail), boxes(tail[-BOX_TAIL:])
    if lines and not strict_box_verify:
        pred = normalize_final_answer(lines[-1])
        right = pred == normalize_final_answer(truth)
    else:
        pred, right = (boxed[-1], boxed[-1] == truth) if boxed else (NONE, False)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}
