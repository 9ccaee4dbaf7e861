"""Regular expressions that every Python in `requires-python` reads alike: 3.11.2 has a bug in what 3.11 was the first to know."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import turnwise

ROOT = Path(__file__).parents[1]
NEW = re.compile(r"\(\?>|(?<!\\)(?:\\\\)*[*+?}]\+")
"""An atomic group, or a quantifier that gives nothing back."""
SET = re.compile(r"\[\^?\]?(?:[^\]\\]|\\.)*\]", re.DOTALL)
"""Of characters: quantifiers are characters there."""


def without_sets(pattern: str) -> str:
    return SET.sub(
        lambda found: "x" if not found.start() or pattern[found.start() - 1] != "\\" else found.group(), pattern
    )


def patterns(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every raw literal and of every literal that is given to `re`."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re."):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value
        if isinstance(node, ast.Constant | ast.JoinedStr):
            line = lines[node.lineno - 1].encode()[node.col_offset :].decode(errors="replace")  # offsets count bytes
            if re.match(r"(?i:rf|fr|r)['\"]", line):
                yield node.lineno, "\n".join([line, *lines[node.lineno : node.end_lineno]])


@pytest.mark.parametrize("text", [r"\s*+a", r"a++", r"[^<]?+", r"(?:ab){2}+", r"(?>a)", r"\\*+", r"[^]]*+", r"\[a*+\]"])
def test_what_is_looked_for_is_seen(text: str) -> None:
    assert NEW.search(without_sets(text))


@pytest.mark.parametrize("text", [r"[*+]", r"\++", r"\*+", r"[^*+?]+", r"a+\+", r"\}+", r"(?:\+\+)"])
def test_what_only_looks_like_it_is_not(text: str) -> None:
    assert not NEW.search(without_sets(text))


def test_no_pattern_is_possessive_or_atomic() -> None:
    folders = (Path(turnwise.__path__[0]), *(ROOT / name for name in ("examples", "benchmarks", "docs")))
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    found = {
        f"{path}:{line}"
        for path in files
        for line, text in patterns(path.read_text(encoding="utf-8"))
        if NEW.search(without_sets(text))
    }
    assert len(files) > 100 and not found, "\n".join(sorted(found))
