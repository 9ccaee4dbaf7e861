"""A dumped prompt and output as messages: ChatML, Llama-3 or plain role lines are split, anything else stays whole.

A text cannot prove who wrote a marker: a policy that writes one as ordinary words is split there too. Plain role lines
(what is left of ChatML when special tokens are dropped) are the weakest, so they count only in the order a template
writes them.
"""

import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from turnwise.types import Message, Role


class Markers(enum.StrEnum):
    """Which markers in a text say who speaks."""

    CHATML = "chatml"
    LLAMA3 = "llama3"
    PLAIN = "plain"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Utterance:
    """What one speaker said: `text[start:end]` of the source, up to `until` with the mark that ends it."""

    role: Role
    text: str
    start: int
    end: int
    until: int


@dataclass(frozen=True, slots=True)
class DumpPrompt:
    """A prompt: its messages, and what stands after the last marker as the beginning of the answer."""

    messages: tuple[Message, ...]
    markers: Markers
    prefill: str

    @property
    def in_reasoning(self) -> bool:
        """Whether the prompt already opened a thought."""
        return self.prefill.rfind("<think>") > self.prefill.rfind("</think>")


ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Texts of the tokens with which a policy ends what it says."""
_ROLES = {role.value: role for role in Role} | {"ipython": Role.TOOL}
_HEADERS = {
    Markers.CHATML: re.compile(r"<\|im_start\|>(?P<role>[a-z]{1,20})(?:\n|\Z)"),
    Markers.LLAMA3: re.compile(r"<\|start_header_id\|>(?P<role>[a-z]{1,20})<\|end_header_id\|>\n{0,2}"),
}
_END = {Markers.CHATML: re.compile(r"<\|im_end\|>"), Markers.LLAMA3: re.compile(r"<\|e(?:ot|om)_id\|>")}
_PADDING = re.compile(r"(?:\s|<\|begin_of_text\|>|<\|endoftext\|>|<\|end_of_text\|>|<s>|</s>|<pad>|<\|im_end\|>)*")
_LINE = re.compile(r"^(?P<role>system|user|assistant|tool)(?:\n|\Z)", re.MULTILINE)
_OPEN, _CLOSE = "<tool_response>", "</tool_response>"


def read_prompt(text: str) -> DumpPrompt:
    """The messages of a prompt; without markers it is one user message."""
    for markers in (Markers.CHATML, Markers.LLAMA3, Markers.PLAIN):
        pieces = _plain_prompt(text) if markers is Markers.PLAIN else _marked(text, markers, None)
        if pieces:
            prefill = ""
            last = pieces[-1]
            if last.role is Role.ASSISTANT and last.until == len(text) and last.end == last.until:
                pieces, prefill = pieces[:-1], last.text
            if pieces:
                return DumpPrompt(
                    tuple(message for piece in pieces for message in messages_of(piece)), markers, prefill
                )
    return DumpPrompt((Message(Role.USER, text),), Markers.NONE, "")


def read_output(text: str, markers: Markers) -> list[Utterance]:
    """Who said what in an output, which begins with the assistant's words; `markers` are those of its prompt.

    Without markers, or where they make no sense, all of it is one answer.
    """
    candidates = (Markers.CHATML, Markers.LLAMA3) if markers is not Markers.PLAIN else (Markers.PLAIN,)
    for candidate in candidates:
        if candidate is Markers.PLAIN:
            return _plain_output(text)
        if (_END[candidate].search(text) or _HEADERS[candidate].search(text)) and (
            pieces := _marked(text, candidate, Role.ASSISTANT)
        ):
            return pieces
    return [Utterance(Role.ASSISTANT, text, 0, len(text), len(text))]


def messages_of(piece: Utterance) -> list[Message]:
    """A reply as messages: tool responses inside a user's turn are the tools' words, the rest is the user's."""
    text = piece.text
    if piece.role is not Role.USER or _OPEN not in text:
        return [Message(piece.role, text)]
    replies: list[Message] = []
    rest: list[str] = []
    position = 0
    while (opened := text.find(_OPEN, position)) >= 0:
        begin = opened + len(_OPEN)
        closed = text.find(_CLOSE, begin)
        end = closed if closed >= 0 else len(text)  # without its end it was cut off
        rest.append(text[position:opened])
        replies.append(Message(Role.TOOL, text[begin:end].removeprefix("\n").removesuffix("\n")))
        position = end + len(_CLOSE) if closed >= 0 else end
    words = "".join([*rest, text[position:]]).strip()
    return [*replies, Message(Role.USER, words)] if words else list(replies)


def _marked(text: str, markers: Markers, first: Role | None) -> list[Utterance] | None:
    """The pieces between special markers; None when there are none, a role is unknown or words stand outside."""
    headers = list(_HEADERS[markers].finditer(text))
    roles = [_ROLES.get(header["role"]) for header in headers]
    begins = [header.end() for header in headers]
    limits = [header.start() for header in headers]
    if first is not None:
        roles, begins = [first, *roles], [0, *begins]
    elif not headers or not _PADDING.fullmatch(text, 0, limits.pop(0)):
        return None
    pieces: list[Utterance] = []
    for role, begin, limit in zip(roles, begins, [*limits, len(text)], strict=True):
        if role is None:
            return None
        end = _END[markers].search(text, begin, limit)
        stop, until = end.span() if end else (limit, limit)
        if not _PADDING.fullmatch(text, until, limit):
            return None
        pieces.append(Utterance(role, text[begin:stop], begin, stop, until))
    return pieces


def _plain_prompt(text: str) -> list[Utterance] | None:
    """Role lines of a prompt that begins with one and ends in the assistant's, as templates write it."""
    lines = list(_in_order(_LINE.finditer(text), None))
    if not lines or lines[0].start() or lines[-1]["role"] != "assistant" or len(lines) < 2:
        return None
    tail = text[lines[-1].end() :]
    if not re.fullmatch(r"\s*(?:<think>\s*(?:</think>\s*)?)?", tail):
        return None  # a line that happens to say "assistant"
    return _cut(text, [(_ROLES[line["role"]], line.end()) for line in lines], [line.start() for line in lines[1:]])


def _plain_output(text: str) -> list[Utterance]:
    """Role lines after the first answer. A reply counts when the assistant speaks again, or when a tool replied."""
    lines = list(_in_order(_LINE.finditer(text), "assistant"))
    while lines and lines[-1]["role"] != "assistant" and not _is_reply(text, lines[-1]):
        lines.pop()
    heads = [(Role.ASSISTANT, 0), *((_ROLES[line["role"]], line.end()) for line in lines)]
    return _cut(text, heads, [line.start() for line in lines])


def _is_reply(text: str, line: re.Match[str]) -> bool:
    return line["role"] == "tool" or text.startswith(_OPEN, line.end())


def _in_order(lines: Iterator[re.Match[str]], speaking: str | None) -> Iterator[re.Match[str]]:
    """Lines that name another speaker than the one before, the system only first; others are words."""
    for line in lines:
        role = line["role"]
        if role != speaking and (role != "system" or speaking is None):
            speaking = role
            yield line


def _cut(text: str, heads: Sequence[tuple[Role, int]], limits: Sequence[int]) -> list[Utterance]:
    pieces = []
    for (role, begin), limit in zip(heads, [*limits, len(text)], strict=True):
        end = limit - 1 if limit < len(text) and limit > begin else limit  # the line break before a role is no word
        end = max(begin, end)
        pieces.append(Utterance(role, text[begin:end], begin, end, end))
    return pieces
