"""A completion's text taken apart into thoughts, calls and words, for every format whose calls begin with a mark."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.chat.calls.reasoning import THINK, UNTHINK
from turnwise.errors import TemplateError
from turnwise.types import JsonSchema, Message, Role, ToolCall


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call as it was written; with a problem it is answered and never run."""

    name: str
    arguments: dict[str, Any]
    problem: str | None = None
    id: str | None = None
    """Where the model itself names its calls."""


Piece = FoundCall | str
Reader = Callable[[str, re.Match[str], Sequence[JsonSchema]], tuple[list[Piece], int]]
"""(text, the mark that begins calls, the tools) -> (the calls and words that follow, where they end). It never goes
back behind what it has read, or the whole would not be linear in the text's length."""


def any_of(marks: Iterable[str]) -> str:
    """A pattern of these marks, the longer first."""
    return "|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True))


class Scanner:
    """Reads the messages of one format: `opening` is the pattern of what begins calls, `read` reads them."""

    def __init__(self, opening: str, read: Reader, thoughts: Mapping[str, str] | None = None) -> None:
        self._read = read
        self._ends = dict(thoughts or {THINK: UNTHINK})
        """What ends a thought, by what opens it; the first are what the format writes."""
        self._tag = re.compile(f"{any_of({*self._ends, *self._ends.values()})}|(?P<call>{opening})")

    def message(self, text: str, *, turn: int, in_reasoning: bool, tools: Sequence[JsonSchema] = ()) -> Message:
        """The assistant message in a completion's text.

        Reasoning is set apart first, so a call the model only considers is never run. `in_reasoning` says that the
        prompt already opened a thought.
        """
        thoughts, rest = self._scan(text, in_reasoning, tools)
        calls = tuple(numbered([piece for piece in rest if isinstance(piece, FoundCall)], turn))
        answer = "".join(piece for piece in rest if isinstance(piece, str)).strip()
        return Message(Role.ASSISTANT, text, calls, reasoning="\n".join(thoughts) if thoughts else None, answer=answer)

    def _scan(self, text: str, in_reasoning: bool, tools: Sequence[JsonSchema]) -> tuple[list[str], list[Piece]]:
        """(thoughts, everything else in order). A thought that is never closed goes on to the end."""
        thoughts: list[str] = []
        rest: list[Piece] = []
        position = spoken = kept = 0  # `spoken` and `kept`: where the words since the last thought begin in text, rest
        ending = next(iter(self._ends.values()))
        thinking = in_reasoning and not text.lstrip().startswith(tuple(self._ends))
        while thinking or position < len(text):
            if thinking:
                end = text.find(ending, position)
                thoughts.append(text[position : end if end >= 0 else None].strip())
                position = spoken = end + len(ending) if end >= 0 else len(text)
                kept, thinking = len(rest), False
                continue
            tag = self._tag.search(text, position)
            rest.append(text[position : tag.start() if tag else None])
            if tag is None:
                break
            position = tag.end()
            if tag["call"] is not None:
                pieces, position = self._read(text, tag, tools)
                rest += pieces
            elif tag.group() in self._ends:
                ending, thinking = self._ends[tag.group()], True
            else:  # closed without being opened: all since the last thought was thought
                thoughts.append(text[spoken : tag.start()].strip())
                del rest[kept:]
                spoken = position
        return thoughts, rest


def numbered(unnumbered: Sequence[FoundCall], turn: int) -> list[ToolCall]:
    """The calls of a turn with their ids."""
    named = [call.id for call in unnumbered]
    counts = Counter(named) if any(named) else {}  # few formats write ids, and every turn comes through here
    calls = []
    for n, call in enumerate(unnumbered):
        # Nine letters and digits: some templates accept no other form of id.
        own = call.id if call.id and counts[call.id] == 1 else f"t{turn % 1000:03d}c{n % 10000:04d}"
        calls.append(ToolCall(own, call.name, call.arguments, call.problem))
    return calls


def refuse_unless_read_back(text: str, call: ToolCall, read: Sequence[FoundCall | ToolCall], form: str) -> str:
    """The text of a call; TemplateError where it would be read as another one, or as none."""
    if [(parsed.name, parsed.arguments, parsed.problem) for parsed in read] != [(call.name, call.arguments, None)]:
        raise TemplateError(
            f"chat.tool_format={form}: the call of {call.name!r} cannot be written so that it is read back as the "
            f"same call: it would be {'; '.join(parsed.problem or 'another call' for parsed in read) or 'no call'}"
        )
    return text
