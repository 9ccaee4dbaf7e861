"""Messages to tokens: the first prompt is rendered once, then only extended by the suffix the template adds."""

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.chat.frame import Frame, written_already
from turnwise.chat.frames import Frames, NoFrame, Place
from turnwise.chat.kinds import TEXTS
from turnwise.chat.replies import ControlTokenEscaper, ControlTokens, fresh_mark, shared, texts_in
from turnwise.chat.selfcheck import TokenSpan, Walk, token_spans
from turnwise.chat.spans import Characters, Span, add_spans, replies_in
from turnwise.chat.template import CallForm as CallForm
from turnwise.chat.template import ChatTemplate
from turnwise.chat.template_words import clock_formats
from turnwise.chat.tokenizer import Tokenizer
from turnwise.chat.tool_format import ToolFormat
from turnwise.errors import EpisodeError, TemplateError
from turnwise.types import Completion, JsonSchema, Ledger, Message, Origin, RenderCheck, Role


class History(enum.StrEnum):
    """What to do when the template would render an earlier message differently once another follows it."""

    REFUSE = "refuse"
    """Stop with an error that shows the difference."""
    VERBATIM = "verbatim"
    """Keep every token as it was sampled and take only the template's suffix."""
    SEGMENT = "segment"
    """Follow the template: open a second sequence that starts from the rewritten history."""


OPENED = 256
"""First prompts whose tokens are kept for the siblings that start with them."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """The tokens of a first prompt, and what it is known by the identity of."""

    known_by: tuple[object, ...]
    ids: list[int]


class HistoryRewritten(Exception):
    """Raised inside `extend` when `History.SEGMENT` asks for a new sequence; the caller reopens."""


class Renderer:
    """One tokenizer, one chat template, one tool-call format."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        call_format: ToolFormat,
        *,
        history: History = History.REFUSE,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.call_format = call_format
        self.history = history
        self.template = ChatTemplate(tokenizer, call_format, template_kwargs or {})
        self.call_form = self.template.call_form
        self.in_reasoning = bool(self.template.thought)
        self.header_length = len(tokenizer.encode(self.template.thought).ids) + 2
        """Tokens at the end of a prompt that show whether it opens a thought; they may begin within a longer one."""
        known = [text for text in call_format.STOPS if text in tokenizer.added_ids]
        self.stop_ids = tokenizer.end_ids | {tokenizer.added_ids[text] for text in (*self.template.stop_texts, *known)}
        self.stop_strings = tuple(text for text in call_format.STOPS if text not in tokenizer.added_ids)
        """Stops of the tool-call format that are no token of this tokenizer."""
        kept = {tokenizer.added_ids[text] for text in call_format.CALL_ENDS if text in tokenizer.added_ids}
        self._unread_ids = self.stop_ids - kept
        closings = [text.lstrip() for text in (self.template.follow.get(Role.USER, ""), self.template.closing)]
        ends = [text for closing in closings for text in self.template.stop_texts if closing.startswith(text)]
        self.end_id = tokenizer.added_ids[ends[0]] if ends else min(tokenizer.end_ids, default=None)
        """The end token of the template's own; None when a message ends by nothing."""
        # Some tokenizers do not flag as special what their template writes between turns.
        glue = self.template.closing + self.template.opening + self.template.follow.get(Role.USER, "")
        thoughts = {call_format.THINK, call_format.UNTHINK} - set(self.template.stop_texts)
        markers = {text for text in tokenizer.added_ids if text in glue} - thoughts
        self._control = ControlTokens({*tokenizer.special_texts, *markers})
        self._control_ids = tokenizer.special_ids | {tokenizer.added_ids[text] for text in markers}
        self._end_texts = {token: tokenizer.decode([token]) for token in self.stop_ids}
        self._opened: dict[tuple[Any, ...], _Opened] = {}
        sources = list(tokenizer.templates.values())
        self._clock = clock_formats("".join(sources))
        self.frames: Frames | None = Frames(self.template, sources)
        """None renders every turn by the template."""

    def render(self, messages: Sequence[Message], tools: Sequence[JsonSchema], *, reply: bool) -> str:
        """The template's text; `reply` adds the header of an assistant message."""
        return self.template.render(messages, tools, reply=reply)

    def open(self, messages: Sequence[Message], tools: Sequence[JsonSchema]) -> list[int]:
        """The ids of the first prompt, assistant header included; siblings have the same."""
        if self._clock is None:
            return self._encode_all(messages, tools)
        time = [datetime.now().strftime(form) for form in self._clock]
        name = (*map(id, messages), None, *map(id, tools), *time)
        found = self._opened.get(name)
        if found is None:
            if len(self._opened) >= OPENED:
                self._opened.pop(next(iter(self._opened)))
            found = self._opened[name] = _Opened((*messages, *tools), self._encode_all(messages, tools))
        return found.ids

    def extend(
        self,
        history: Sequence[Message],
        assistant: Message,
        completion: Completion,
        replies: Sequence[Message],
        tools: Sequence[JsonSchema],
    ) -> list[Span]:
        """The tokens that follow `completion` when `replies` answer it, assistant header included.

        `history` is everything before the assistant's message. A turn like an earlier one is filled into that one's
        frame; the self-check at the end compares the whole.
        """
        escaper, end = self._escaper(replies), self._end_text(completion)
        shown = [escaper.escape(reply) for reply in replies] if escaper.hides else replies
        place = None
        if self.frames is not None:
            try:
                place = self.frames.place(history, assistant, end, shown, tools)
            except NoFrame as reason:
                self.frames.rendered[str(reason)] += 1
        frame = self.frames.find(place) if self.frames is not None and place is not None else None
        if frame is None:
            return self._extend(history, assistant, end, shown, tools, escaper, place)
        words = frame.words(shown)
        if frame.parts and self.frames is not None and not escaper.hides:
            return self.frames.spans(frame, words, self.tokenizer, self._control_ids)
        return self._spans(*frame.fill(words), escaper, end)

    def _extend(
        self,
        history: Sequence[Message],
        assistant: Message,
        end: str,
        shown: Sequence[Message],
        tools: Sequence[JsonSchema],
        escaper: ControlTokenEscaper,
        place: Place | None,
    ) -> list[Span]:
        """By the template. Where it adds the same suffix whatever happened in between, only the first prompt of the
        history is rendered, so that a late turn costs no more than an early one."""
        first = self.template.first_prompt(history, shown)
        context = history if first is None else first
        try:
            after, start = self.template.locate(context, assistant, end, shown, tools)
            if start is None and self.history is History.REFUSE:
                recorded = self.render(context, tools, reply=True) + assistant.text + end
                raise TemplateError(_rewrite_message(recorded, after))
        except TemplateError as error:
            if self.template.rejects_words(context, assistant, end, shown, tools):
                raise EpisodeError(f"a message of the policy does not fit the chat template: {error}") from error
            raise
        if start is None and self.history is History.SEGMENT:
            raise HistoryRewritten
        if start is None:
            assistant, after, start = self.template.marked_tail(context, assistant, shown, tools)
        marks = {number: f"{fresh_mark(())}{number}X" for number, reply in enumerate(shown) if reply.text}
        marked = [replace(reply, content=marks.get(number, "")) for number, reply in enumerate(shown)]
        skeleton = self.render([*context, assistant, *marked], tools, reply=True)[start:]
        for number, mark in marks.items():
            if mark not in skeleton:
                raise TemplateError(f"the chat template does not show what a {shown[number].role} replies")
        tail = after[start:]
        places = list(replies_in(tail, skeleton, {mark: shown[n] for n, mark in marks.items()}))
        if place is not None and self.frames is not None:
            self.frames.keep(place, self._frame(place, tail, skeleton, list(marks.values()), shown, end))
        return self._spans(tail, places, escaper, end)

    def _frame(
        self, place: Place, tail: str, skeleton: str, marks: Sequence[str], shown: Sequence[Message], end: str
    ) -> Frame | None:
        """The frame of a turn that the template has rendered, unless it shows other words than were replied."""
        glue = []
        for mark in marks:
            before, found, skeleton = skeleton.partition(mark)
            glue.append(before)
            if not found:  # in another order than they were given
                return None
        frame = Frame((*glue, skeleton), place.slots())
        words = frame.words(shown)
        if frame.fill(words)[0] != tail:
            return None
        nothing = self._escaper(())
        return frame.in_parts(
            end, self.tokenizer, self._control_ids,
            whole=lambda text, places: self._spans(text, places, nothing, end),
            tries=[words, *([text] * len(words) for text in TEXTS)],
        )  # fmt: skip

    def read(
        self,
        completion: Completion,
        turn: int,
        before: Sequence[int] | NDArray[np.int64] | None = None,
        tools: Sequence[JsonSchema] = (),
    ) -> Message:
        """The assistant message a completion spells out.

        `before` are the last `header_length` ids, or more, that it continues: some templates open a <think> block after
        a user but not after a tool.
        """
        ids = completion.token_ids.tolist()
        if ids and ids[-1] in self._unread_ids:
            ids = ids[:-1]
        in_reasoning = self.in_reasoning
        if in_reasoning and before is not None:
            in_reasoning = self.tokenizer.decode(before[-self.header_length :]).endswith(self.template.thought)
        return self.call_format.parse(self.tokenizer.decode(ids), turn=turn, in_reasoning=in_reasoning, tools=tools)

    def check(self, ledger: Ledger, messages: Sequence[Message], tools: Sequence[JsonSchema]) -> RenderCheck:
        """The recorded tokens against one full render of the final messages.

        Of a last assistant message the words are compared, not how the template would show them: no model saw that.
        A template that refuses the conversation as a whole leaves `position` empty: there is nothing to compare.
        """
        answered = messages[-1].role is Role.ASSISTANT
        words = messages[-1].text + self.template.closing if answered else ""
        try:
            expected = self._encode_all(messages[:-1] if answered else messages, tools, words)
        except TemplateError as error:
            problem = (
                None if self.history is History.VERBATIM else f"the whole conversation cannot be rendered: {error}"
            )
            return RenderCheck(exact=False, same_text=False, problem=problem)
        recorded = ledger.token_ids.tolist()
        common = shared(expected, recorded)
        closing = self._closing
        if common == len(recorded) and closing.endswith(self.tokenizer.decode(expected[common:])):
            return RenderCheck(exact=True, same_text=True)  # the usual case, and decoding all of it is slow
        rendered, written = self.tokenizer.decode(expected), self.tokenizer.decode(recorded)
        unended = self.tokenizer.decode(recorded[:-1]) if set(recorded[-1:]) & self.stop_ids else written
        # What closes the last message may be missing: it was cut short, or the template closes it only later.
        closed = rendered.startswith(written) and closing.endswith(rendered[len(written) :])
        same_text = closed or rendered == unended
        exact = same_text and common >= min(len(expected), len(recorded))
        declared = same_text or self.history is History.VERBATIM
        problem = None if declared else self._problem(ledger, rendered, messages, tools)
        return RenderCheck(exact, same_text, None if exact else common, problem)

    def _problem(
        self, ledger: Ledger, rendered: str, messages: Sequence[Message], tools: Sequence[JsonSchema]
    ) -> str | None:
        """The first difference that is not of the policy's making: its own words, their edges and its end tokens."""
        walk, decode = Walk(rendered), self.tokenizer.decode
        answered = [i for i, one in enumerate(messages) if one.role is Role.ASSISTANT and one.answer is not None]
        for span in token_spans(ledger):
            if span.policy:
                ended = span.ids[-1] in self.stop_ids
                words = span.ids[:-1] if ended else span.ids
                until = answered[span.turn] + 1
                spelled = until == len(messages)  # the words of a last message are what `check` compares
                found = self._follow(walk, words, messages[:until], tools, spelled=spelled)
                walk.ended(decode(span.ids[-1:]) if ended else "")
            else:
                found = walk.pass_given(decode(span.ids))
            if found is not None and not span.start and self._has_a_clock(span, messages, answered, ledger, tools):
                return None
            if found is not None:
                return f"at token {span.start} (turn {span.turn}): {found}"
        return None

    def _follow(
        self, walk: Walk, words: list[int], messages: Sequence[Message], tools: Sequence[JsonSchema], *, spelled: bool
    ) -> str | None:
        """Go past the last of these messages, which the policy wrote; `spelled` as it did, whatever it calls."""
        decode, encode = self.tokenizer.decode, self.tokenizer.encode
        if spelled or not self.template.is_structured(messages[-1]):
            # As the tokenizer reads them: it may normalise what a sampler spells otherwise.
            return walk.pass_written(decode(encode(decode(words), after="").ids), self.template.thought.strip())
        escaper = self._escaper(messages, tools)
        text = self._escaped(escaper, messages, tools, reply=False)
        text, cuts = escaper.unescape(text[: self.template.closing_start(text, structured=True)])
        return walk.jump(decode(encode(text, cuts=cuts).ids))

    def _has_a_clock(
        self,
        first: TokenSpan,
        messages: Sequence[Message],
        answered: Sequence[int],
        ledger: Ledger,
        tools: Sequence[JsonSchema],
    ) -> bool:
        """Whether the same prompt is rendered otherwise by now: nothing later can be compared with it."""
        turns = [turn for origin, turn, _ in ledger.spans() if origin is Origin.POLICY]
        return bool(turns) and self._encode_all(messages[: answered[turns[0]]], tools) != first.ids

    @functools.cached_property
    def _closing(self) -> str:
        """What ends an assistant's message, as its tokens read."""
        return self.tokenizer.decode(self.tokenizer.encode(self.template.closing).ids)

    # --- the parts of an extension ----------------------------------------------------------------------------

    def _escaper(self, messages: Sequence[Message], tools: Sequence[JsonSchema] = ()) -> ControlTokenEscaper:
        texts: list[str] = []
        for message in messages:
            texts += (message.text, message.name or "")
        texts += texts_in(tools)
        return ControlTokenEscaper(self._control, texts)

    def _encode_all(self, messages: Sequence[Message], tools: Sequence[JsonSchema], words: str = "") -> list[int]:
        """One render in tokens, and words after it. What users and tools wrote is text, whatever it spells."""
        escaper = self._escaper(messages, tools)
        text, cuts = escaper.unescape(self._escaped(escaper, messages, tools, reply=True))
        return self.tokenizer.encode(text + words, cuts=cuts).ids

    def _escaped(
        self, escaper: ControlTokenEscaper, messages: Sequence[Message], tools: Sequence[JsonSchema], *, reply: bool
    ) -> str:
        shown = [escaper.escape(message) for message in messages]
        return self.render(shown, escaper.escape_tools(tools), reply=reply)

    def _end_text(self, completion: Completion) -> str:
        return self._end_texts.get(int(completion.token_ids[-1]), "") if len(completion.token_ids) else ""

    def _spans(self, tail: str, places: Sequence[Characters], escaper: ControlTokenEscaper, end: str) -> list[Span]:
        """Tokens of the tail: what a tool or user wrote keeps its origin, the rest is the template's."""
        skip = written_already(tail, end)
        text, cuts = escaper.unescape(tail)
        encoding = self.tokenizer.encode(text[skip:], cuts=[cut - skip for cut in cuts], after=end if skip else "")
        spans: list[Span] = []
        moved = [(start - skip, stop - skip, origin) for start, stop, origin in places] if skip else places
        add_spans(spans, encoding, moved, self._control_ids)
        return spans


def _rewrite_message(before: str, after: str) -> str:
    at = max(shared(before, after) - 16, 0)  # with a little of what is still the same
    return (
        "the chat template rewrites history: once a reply follows, earlier text changes from "
        f"{before[at : at + 60]!r} to {after[at : at + 60]!r}. Tokens that were sampled would no longer be what is "
        "trained. Use a template that only appends (chat.template=chatml_hermes), or choose chat.history=verbatim "
        "(keep the sampled tokens) or chat.history=segment (open a second sequence)"
    )
