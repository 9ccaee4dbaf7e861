"""Messages to tokens: the first prompt is rendered once, then only extended by the suffix the template adds."""

import contextlib
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jinja2

from turnwise.chat.tokenizer import Tokenizer
from turnwise.errors import EpisodeError, TemplateError
from turnwise.types import Completion, JsonSchema, Ledger, Message, Origin, RenderCheck, Role, ToolCall

_MARK = "turnwiseXmarkX"  # plain letters: no template trims, escapes or splits it
_REPLY_ORIGIN = {Role.TOOL: Origin.TOOL, Role.USER: Origin.USER, Role.SYSTEM: Origin.USER}


class History(enum.StrEnum):
    """What to do when the template would render an earlier message differently once another follows it."""

    REFUSE = "refuse"
    """Stop with an error that shows the difference."""
    VERBATIM = "verbatim"
    """Keep every token as it was sampled and take only the template's suffix."""
    SEGMENT = "segment"
    """Follow the template: open a second sequence that starts from the rewritten history."""


class CallForm(enum.StrEnum):
    """How an assistant message with tool calls is put to the template."""

    RAW = "raw"
    """As the text the policy wrote."""
    STRUCTURED = "structured"
    """As `tool_calls`, for templates that refuse a tool message after plain text."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one origin."""

    ids: list[int]
    origin: Origin


class HistoryRewritten(Exception):
    """Raised inside `extend` when `History.SEGMENT` asks for a new sequence; the caller reopens."""


class Renderer:
    """One tokenizer, one chat template, one tool-call format."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        call_format: ModuleType,
        *,
        history: History = History.REFUSE,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.call_format = call_format
        self.history = history
        self._kwargs = template_kwargs or {}
        user = Message(Role.USER, "hello")
        marked = self.render([user, Message(Role.ASSISTANT, _MARK)], (), reply=False)
        if marked.count(_MARK) != 1:
            raise TemplateError("the chat template does not show an assistant message exactly once")
        self._closing = marked[marked.index(_MARK) + len(_MARK) :]
        opened = self.render([user], (), reply=True)
        opening = opened[len(self.render([user], (), reply=False)) :]
        self.in_reasoning = opening.rfind("<think>") > opening.rfind("</think>")
        self.stop_ids = frozenset(tokenizer.end_ids | self._closing_end())
        self.call_form = self._choose_call_form()

    # --- messages to text -------------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], tools: Sequence[JsonSchema], *, reply: bool) -> str:
        """The template's text; `reply` adds the header of an assistant message."""
        form = getattr(self, "call_form", CallForm.RAW)
        return self._template([_as_dict(message, form) for message in messages], tools, reply)

    def _template(self, messages: list[dict[str, Any]], tools: Sequence[JsonSchema], reply: bool) -> str:
        try:
            return self.tokenizer.apply_template(messages, list(tools), reply, self._kwargs)
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateError(f"the chat template cannot render the roles [{roles}]: {error}") from error

    # --- text to tokens ---------------------------------------------------------------------------------------

    def open(self, messages: Sequence[Message], tools: Sequence[JsonSchema]) -> list[int]:
        """The ids of the first prompt, assistant header included."""
        return self.tokenizer.encode(self.render(messages, tools, reply=True)).ids

    def extend(
        self,
        prompt: Sequence[Message],
        assistant: Message,
        completion: Completion,
        replies: Sequence[Message],
        tools: Sequence[JsonSchema],
    ) -> list[Span]:
        """The tokens that follow `completion` when `replies` answer it, assistant header included.

        Only the prompt, this assistant message and the replies are rendered, so a long conversation costs no more
        per turn than a short one; the self-check at the end compares the whole.
        """
        before = self.render([*prompt, assistant], tools, reply=False)
        after = self.render([*prompt, assistant, *replies], tools, reply=True)
        if after.startswith(before) and before.endswith(self._closing):
            tail = after[len(before) - len(self._closing) :]
        elif self.history is History.REFUSE:
            raise TemplateError(self._rewrite_message(before, after))
        elif self.history is History.SEGMENT:
            raise HistoryRewritten
        else:
            tail = self._marked_tail(prompt, assistant, replies, tools)
        end = self._end_text(completion)
        return self._spans(tail[len(end) :] if tail.startswith(end) else tail, replies)

    def read(self, completion: Completion, turn: int) -> Message:
        """The assistant message a completion spells out."""
        ids = completion.token_ids
        if ids and ids[-1] in self.stop_ids:
            ids = ids[:-1]
        text = self.tokenizer.decode(ids)
        message: Message = self.call_format.parse(text, turn=turn, in_reasoning=self.in_reasoning)
        return message

    def check(self, ledger: Ledger, messages: Sequence[Message], tools: Sequence[JsonSchema]) -> RenderCheck:
        """The recorded tokens against one full render of the final messages."""
        text = self.render(messages, tools, reply=False)
        expected, recorded = self.tokenizer.encode(text).ids, ledger.token_ids
        same = len(expected) >= len(recorded) and expected[: len(recorded)] == recorded
        left = self.tokenizer.decode(expected[len(recorded) :]) if same else ""
        if same and self._closing.endswith(left):
            return RenderCheck(exact=True, same_text=True)
        position = next(
            (i for i, (a, b) in enumerate(zip(expected, recorded, strict=False)) if a != b),
            min(len(expected), len(recorded)),
        )
        return RenderCheck(False, self._same_text(text, self.tokenizer.decode(recorded)), position)

    # --- the parts of an extension ----------------------------------------------------------------------------

    def _same_text(self, rendered: str, recorded: str) -> bool:
        return rendered.startswith(recorded) and self._closing.endswith(rendered[len(recorded) :])

    def _closing_end(self) -> set[int]:
        """The first token of what closes an assistant message, when it is a special token."""
        ids = self.tokenizer.encode(self._closing).ids
        return {ids[0]} if ids and ids[0] in self.tokenizer.special_ids else set()

    def _end_text(self, completion: Completion) -> str:
        ids = completion.token_ids
        return self.tokenizer.decode(ids[-1:]) if ids and ids[-1] in self.stop_ids else ""

    def _marked_tail(
        self, prompt: Sequence[Message], assistant: Message, replies: Sequence[Message], tools: Sequence[JsonSchema]
    ) -> str:
        """What follows the assistant's words, found by a mark in their place."""
        marked = Message(Role.ASSISTANT, _MARK, assistant.tool_calls)
        text = self.render([*prompt, marked, *replies], tools, reply=True)
        if text.count(_MARK) != 1:
            raise TemplateError("the chat template drops or repeats an assistant message that a reply follows")
        return text[text.index(_MARK) + len(_MARK) :]

    def _spans(self, tail: str, replies: Sequence[Message]) -> list[Span]:
        """Tokens of the tail: what a tool or user wrote keeps its origin, the rest is the template's."""
        pieces: list[tuple[int, int, Origin]] = []
        cursor = 0
        for reply in replies:
            start, end = _find(reply.text, tail, cursor)
            if start < 0:
                if self.tokenizer.has_special(reply.text):
                    raise EpisodeError("a reply holds control tokens and the template rewrites it; it cannot be placed")
                return [Span(self.tokenizer.encode(tail).ids, _REPLY_ORIGIN[reply.role])]
            pieces.append((start, end, _REPLY_ORIGIN[reply.role]))
            cursor = end
        if any(self.tokenizer.has_special(tail[start:end]) for start, end, _ in pieces):
            return self._spans_apart(tail, pieces)
        encoding = self.tokenizer.encode(tail)
        spans: list[Span] = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            origin = next((o for s, e, o in pieces if s < e and start < e and max(end, start + 1) > s), Origin.TEMPLATE)
            if not spans or spans[-1].origin is not origin:
                spans.append(Span([], origin))
            spans[-1].ids.append(token)
        return spans

    def _spans_apart(self, tail: str, pieces: list[tuple[int, int, Origin]]) -> list[Span]:
        """Replies that spell control tokens are encoded as plain text, so that a tool cannot forge a turn."""
        spans: list[Span] = []
        cursor = 0
        for start, end, origin in pieces:
            spans.append(Span(self.tokenizer.encode(tail[cursor:start]).ids, Origin.TEMPLATE))
            spans.append(Span(self.tokenizer.encode_plain(tail[start:end]), origin))
            cursor = end
        spans.append(Span(self.tokenizer.encode(tail[cursor:]).ids, Origin.TEMPLATE))
        return [span for span in spans if span.ids]

    def _choose_call_form(self) -> CallForm:
        call = ToolCall("t000c0000", "probe", {"x": 1})
        text = self.call_format.render_call(call)
        asked = Message(Role.ASSISTANT, text, (call,))
        messages = [Message(Role.USER, "hello"), asked, Message(Role.TOOL, "1", tool_call_id=call.id, name=call.name)]
        for form in CallForm:
            with contextlib.suppress(TemplateError):
                self._template([_as_dict(message, form) for message in messages], (), True)
                return form
        return CallForm.RAW  # single-turn and user-turn conversations still work; the preflight tests tools by doing

    def _rewrite_message(self, before: str, after: str) -> str:
        at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
        return (
            "the chat template rewrites history: once a reply follows, earlier text changes from "
            f"{before[at : at + 40]!r} to {after[at : at + 40]!r}. Tokens that were sampled would no longer be what is "
            "trained. Use a template that only appends (chat.template=chatml_hermes), or choose chat.history=verbatim "
            "(keep the sampled tokens) or chat.history=segment (open a second sequence)"
        )


def _as_dict(message: Message, form: CallForm) -> dict[str, Any]:
    """A message as templates expect it."""
    entry: dict[str, Any] = {"role": message.role.value, "content": message.text}
    readable = [call for call in message.tool_calls if call.problem is None]
    if form is CallForm.STRUCTURED and readable:
        entry["content"] = message.visible
        entry["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in readable
        ]
    if message.role is Role.TOOL:
        entry["tool_call_id"] = message.tool_call_id
        entry["name"] = message.name
    return entry


def _find(needle: str, text: str, cursor: int) -> tuple[int, int]:
    """Where a reply stands in the rendered tail, as it is or trimmed."""
    for candidate in (needle, needle.strip()):
        start = text.find(candidate, cursor)
        if start >= 0:
            return start, start + len(candidate)
    return -1, -1
