"""Finding answers in what a policy wrote: the last \\boxed{...} with its braces matched, the last pair of tags."""

import re

_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"\\boxed\s+([^\s{}$\\]+)")


def boxes(text: str) -> list[str]:
    """What stands in each box, in order. Of a box in a box only the inner counts; one never closed does not."""
    contents: list[str] = []
    outer: list[tuple[int | None, int]] = []  # for each open brace: where its box begins, and how many were found then
    for match in _BRACE.finditer(text):
        token = match.group()
        if token == "}":
            if outer:
                start, before = outer.pop()
                if start is not None and len(contents) == before:
                    contents.append(text[start : match.start()].strip())
        elif token.endswith("{") and token != "\\{":
            outer.append((match.end() if token != "{" else None, len(contents)))
    if not contents:  # \boxed 18, as TeX allows for a single thing
        contents = [bare.rstrip(".,;:") for bare in _BARE.findall(text)]
    return [content for content in contents if content]


def tagged(text: str, tag: str) -> list[str]:
    """What stands in each <tag>...</tag>, in order. The opening one nearest to its end counts."""
    contents = []
    position = 0
    opening, closing = f"<{tag}>", f"</{tag}>"
    while (end := text.find(closing, position)) >= 0:
        start = text.rfind(opening, position, end)
        if start >= 0:
            contents.append(text[start + len(opening) : end].strip())
        position = end + len(closing)
    return contents
