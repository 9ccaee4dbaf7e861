"""Code in what a model wrote: between <code> tags, or else in Markdown fences. The only reader of either."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

PYTHON = ("", "python", "py", "python3")
"""What a fence of Python is called; many name no language."""
_TAGGED = re.compile(r"<code>(.*?)(</code>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """One block and where it stands: `CodeBlock("python", "print(1)", 0, 24, is_closed=True)`."""

    language: str
    code: str
    start: int
    end: int
    is_closed: bool
    """False for a block that the text ends in."""


def code_blocks(text: str) -> list[CodeBlock]:
    """The blocks of a text in order: between tags if it has any, of Python then; else in fences, of any language."""
    if "<code>" not in text:
        return list(_fences(text))
    return [
        CodeBlock("python", _inside(match[1]), match.start(), match.end(), bool(match[2]))
        for match in _TAGGED.finditer(text)
    ]


def programs(text: str) -> list[str]:
    """The closed blocks of Python, in order."""
    return [block.code for block in code_blocks(text) if block.is_closed and block.language in PYTHON]


def program(text: str) -> str:
    """The code in a tool's argument, which models wrap into tags or fences there too; the text itself without any."""
    return "\n".join(programs(text)) or text


def _inside(text: str) -> str:
    """What stands between tags: models write fences there too."""
    fenced = [block.code for block in _fences(text) if block.is_closed and block.language in PYTHON]
    return "\n".join(fenced) if fenced else text.strip("\n")


def _fences(text: str) -> Iterator[CodeBlock]:
    """Line by line, because no pattern does it in linear time. The last line of code may hold the closing mark."""
    language: str | None = None
    body: list[str] = []
    start = position = 0
    for line in text.splitlines(keepends=True):
        mark = line.strip()
        if language is None:
            if mark.startswith("```") and "`" not in mark[3:]:
                language, body, start = mark[3:].partition(" ")[0].lower(), [], position
        elif mark.endswith("```") and "`" not in mark[:-3]:
            last = [line.rstrip()[:-3]] if mark != "```" else []
            yield CodeBlock(language, "".join([*body, *last]).strip("\n"), start, position + len(line), is_closed=True)
            language = None
        else:
            body.append(line)
        position += len(line)
    if language is not None:
        yield CodeBlock(language, "".join(body), start, position, is_closed=False)
