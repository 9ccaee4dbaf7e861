"""Finding answers in what a policy wrote: the last \\boxed{...} with its braces matched, the last pair of tags."""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_BARE = re.compile(r"\\boxed\s+([^\s{}$\\]+)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def boxes(text: str) -> list[str]:
    """What stands in each box, in order. A box in a box counts once, from the inside; one never closed does not."""
    found: list[str] = []
    position = 0
    while (start := _BOX.search(text, position)) is not None:
        end = _closing(text, start.end())
        if end is None:
            position = start.end()
            continue
        inside = text[start.end() + 1 : end]
        found += boxes(inside) or [inside.strip()] if _BOX.search(inside) else [inside.strip()]
        position = end + 1
    if not found:  # \boxed 18, as TeX allows for a single thing
        found = [bare.rstrip(".,;:") for bare in _BARE.findall(text)]
    return [one for one in found if one]


def _closing(text: str, opening: int) -> int | None:
    """Where the brace at `opening` is closed; escaped braces do not count."""
    depth = 0
    for match in _BRACE.finditer(text, opening):
        if match.group() == "{":
            depth += 1
        elif match.group() == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return None


def tagged(text: str, tag: str) -> list[str]:
    """What stands in each <tag>...</tag>, in order. The opening one nearest to its end counts."""
    found = []
    position = 0
    opening, closing = f"<{tag}>", f"</{tag}>"
    while (end := text.find(closing, position)) >= 0:
        start = text.rfind(opening, position, end)
        if start >= 0:
            found.append(text[start + len(opening) : end].strip())
        position = end + len(closing)
    return found
