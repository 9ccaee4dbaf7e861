"""One `key=value` of a command line as a value: numbers, words, quoted text, lists and dicts, as Hydra writes them.

A word is text unless it is a number, true, false or null; letters, digits and `_-/\\+.$%*@?|:` need no quotes, a
backslash takes the meaning from `()[]{}:=,` and spaces. Tests compare every reading with Hydra's own parser, which
knows no letters beyond ASCII.
"""

import re
import unicodedata
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Unreadable(ValueError):
    """Text that is no key=value; the message says what stands where it cannot."""


@dataclass(frozen=True, slots=True)
class Override:
    """What one text says."""

    key: str
    value: Any
    written: str
    """The value as it was written."""


class _Kind(Enum):
    MARK = "mark"
    COLON = "colon"
    QUOTED = "quoted"
    NUMBER = "number"
    WORD = "word"
    ESCAPED = "escaped"
    SPACE = "space"
    REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class _Token:
    kind: _Kind
    text: str
    mark: str = ""
    """One of `()[]{},=:`, without the spaces around it."""


_WHOLE = r"(?:0|[1-9](?:_?[0-9])*)"
_NAME = rf"(?:[a-zA-Z_$][a-zA-Z0-9_$-]*|{_WHOLE})"
_KEY = re.compile(rf"\+{{0,2}}({_NAME}(?:\.{_NAME})*)=")
_POINT = rf"(?:{_WHOLE}?\.[0-9](?:_?[0-9])*|{_WHOLE}\.)"
_NUMBER = rf"(?:{_POINT}|{_WHOLE})[eE][+-]?[0-9](?:_?[0-9])*|{_POINT}|{_WHOLE}|[iI][nN][fF]|[nN][aA][nN]"
_PATTERNS = (
    (_Kind.MARK, re.compile(r"[ \t]*([(,=])[ \t]*|([\[{])[ \t]*|[ \t]*([)\]}])")),
    (_Kind.COLON, re.compile(r"[ \t]*:[ \t]*")),
    (_Kind.NUMBER, re.compile(rf"[+-]?(?:{_NUMBER})")),
    (_Kind.WORD, re.compile(r"[a-zA-Z_][a-zA-Z0-9_-]*")),
    (_Kind.WORD, re.compile(r"[/\-\\+.$%*@?|]")),
    (_Kind.ESCAPED, re.compile(r"(?:\\[\\()\[\]{}:=, \t])+")),
    (_Kind.SPACE, re.compile(r"[ \t]+")),
    (_Kind.QUOTED, re.compile(r""""(?:(?:\\\\)*|.*?[^\\](?:\\\\)*)"|'(?:(?:\\\\)*|.*?[^\\](?:\\\\)*)'""", re.DOTALL)),
    (_Kind.REFERENCE, re.compile(r"\$\{[^}]+\}")),
)  # fmt: skip
"""The longest match is taken, of two as long the first."""
_DIGITS = re.compile(r"[+-]?[0-9_]+")
_CONSTANTS = {"null": None, "true": True, "false": False}


def read_override(text: str) -> Override:
    """The key and the value of `key=value`; Unreadable where it is none."""
    found = _KEY.match(text)
    if found is None:
        raise Unreadable("only key=value is supported, and the key is a name")
    written = text[found.end() :]
    tokens = _Tokens(_split(written.lstrip(" \t")))
    value = tokens.element() if tokens.is_left() else ""
    if tokens.mark() == ",":
        raise Unreadable("only key=value is supported; a list stands in [brackets]")
    if tokens.is_left():
        raise Unreadable(tokens.problem())
    return Override(found[1], value, written)


def _split(text: str) -> list[_Token]:
    tokens, at = [], 0
    while at < len(text):
        matches = [(kind, match) for kind, pattern in _PATTERNS if (match := pattern.match(text, at))]
        if not matches and _is_letter(text[at]):
            tokens.append(_Token(_Kind.WORD, text[at]))
            at += 1
            continue
        if not matches:
            raise Unreadable(f"{text[at]!r} cannot stand there")
        kind, match = max(matches, key=lambda pair: pair[1].end())
        mark = ":" if kind is _Kind.COLON else next(filter(None, match.groups()), "") if kind is _Kind.MARK else ""
        tokens.append(_Token(kind, match.group(), mark))
        at = match.end()
    return tokens


def _is_letter(character: str) -> bool:
    """A letter, accent or digit of any script; no sign, such as the quotes that a web page makes of ours."""
    return unicodedata.category(character)[0] in "LMN"


class _Tokens:
    """What is left to read."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens, self._at = tokens, 0

    def is_left(self) -> bool:
        return self._at < len(self._tokens)

    def mark(self) -> str | None:
        """The mark that comes next, if one does."""
        return self._tokens[self._at].mark or None if self.is_left() else None

    def problem(self) -> str:
        """What is wrong with what comes next."""
        if not self.is_left():
            return "it ends too early"
        return f"{self._tokens[self._at].text.strip() or ' '!r} cannot stand there"

    def element(self) -> Any:
        """A list, a dict or a plain value."""
        match self.mark():
            case "[":
                return self._several("]", self.element)
            case "{":
                return dict(self._several("}", self._pair))
        return self._plain()

    def _several(self, end: str, one: Any) -> list[Any]:
        self._at += 1
        found: list[Any] = []
        while self.mark() != end or found:
            found.append(one())
            if self.mark() == end:
                break
            if self.mark() != ",":
                raise Unreadable(self.problem())
            self._at += 1
        self._at += 1
        return found

    def _pair(self) -> tuple[Any, Any]:
        key = self._plain(of_a_dict=True)
        if self.mark() != ":":
            raise Unreadable(self.problem())
        self._at += 1
        return key, self.element()

    def _plain(self, *, of_a_dict: bool = False) -> Any:
        """Text, a number, a truth value or null; the name in a dict has no quotes and no colon."""
        if self.is_left() and self._tokens[self._at].kind is _Kind.QUOTED and not of_a_dict:
            self._at += 1
            return _unquoted(self._tokens[self._at - 1].text)
        last = (_Kind.MARK, _Kind.QUOTED) + ((_Kind.COLON, _Kind.REFERENCE) if of_a_dict else ())
        start = self._at
        while self.is_left() and self._tokens[self._at].kind not in last:
            self._at += 1
        parts = self._tokens[start : self._at]
        if self.mark() == "(" and parts and parts[-1].kind is _Kind.WORD:
            raise Unreadable("only key=value is supported, without functions")
        if not parts:
            raise Unreadable(self.problem())
        if all(part.kind is _Kind.SPACE for part in parts):
            raise Unreadable("there is nothing but spaces where a value should be")
        parts = parts[parts[0].kind is _Kind.SPACE :]
        parts = parts[: len(parts) - (parts[-1].kind is _Kind.SPACE)]
        if len(parts) == 1:
            return _constant(parts[0])
        return "".join(part.text[1::2] if part.kind is _Kind.ESCAPED else part.text for part in parts)


def _constant(token: _Token) -> Any:
    if token.kind is _Kind.ESCAPED:
        return token.text[1::2]
    if token.kind is _Kind.WORD:
        return _CONSTANTS.get(token.text.lower(), token.text)
    if token.kind is not _Kind.NUMBER:
        return token.text
    if not _DIGITS.fullmatch(token.text):
        return float(token.text)
    try:
        return int(token.text)
    except ValueError as error:  # more digits than Python reads
        raise Unreadable("the number is too long") from error


def _unquoted(text: str) -> str:
    """Without its quotes; of the backslashes before a quote every second is left."""
    halved = re.sub(rf"\\+{text[0]}", lambda found: found.group()[1::2], text[1:])
    return halved if text.endswith(f"\\{text[0]}") else halved[:-1]
