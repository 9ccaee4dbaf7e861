"""Messages to tokens: the first prompt is rendered once, then only extended by the suffix the template adds."""

import copy
import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from turnwise.chat.calls.tool_format import ToolFormat
from turnwise.chat.control_tokens import ControlTokenEscaper, ControlTokens, texts_in
from turnwise.chat.images.blocks import (
    NO_MEDIA,
    MediaOf,
    Prompt,
    SpelledMarkers,
    expand,
    find_markers,
    images_in,
    media_of,
    with_images,
)
from turnwise.chat.render_check import SelfCheck
from turnwise.chat.spans import Characters, Span, add_spans, replies_in
from turnwise.chat.template.analysis import clock_formats
from turnwise.chat.template.chat_template import CALL, HELLO, RESULT, ChatTemplate
from turnwise.chat.template.history import Follower, RepliedMessage, demand_marks, mark_texts, marks_for_words
from turnwise.chat.template.history import HistoryRewritten as HistoryRewritten
from turnwise.chat.template.message_forms import CallForm as CallForm
from turnwise.chat.template.reply_frame import Frame, written_already
from turnwise.chat.template.reply_frame_cache import FrameKey, Frames, NoFrame
from turnwise.chat.template.text_changes import TEXTS
from turnwise.chat.tokenizer import Tokenizer
from turnwise.config.choices import HistoryPolicy
from turnwise.errors import TemplateError
from turnwise.types import Completion, Image, JsonSchema, Ledger, Message, RenderCheck, Role, Text

if TYPE_CHECKING:
    from turnwise.chat.images.processor import ImageProcessor

CHATML = ("<|im_start|>", "<|im_end|>")
MOST_OPENED = 4_000_000
"""Tokens of first prompts that are kept, four bytes each: from the check of their length for the episodes that start
with them."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """The tokens of a first prompt, and what it is known by the identity of."""

    known_by: tuple[object, ...]
    ids: "array[int]"


class Renderer:
    """One tokenizer, one chat template, one tool-call format."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        call_format: ToolFormat,
        *,
        history: HistoryPolicy = HistoryPolicy.refuse,
        template_kwargs: dict[str, Any] | None = None,
        images: "ImageProcessor | None" = None,
        text_only: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.call_format = call_format
        self.history = history
        self.template = ChatTemplate(tokenizer, call_format, template_kwargs or {})
        self.call_form = self.template.call_form
        self.in_reasoning = bool(self.template.thought)
        self.header_length = len(tokenizer.encode(self.template.thought).ids) + 2
        """Tokens at the end of a prompt that show whether it opens a thought; they may begin within a longer one."""
        stops = [text for text in call_format.STOPS if text in tokenizer.added_ids]
        self.stop_ids = tokenizer.end_ids | {tokenizer.added_ids[text] for text in (*self.template.stop_texts, *stops)}
        self.stop_strings = tuple(text for text in call_format.STOPS if text not in tokenizer.added_ids)
        """Stops of the tool-call format that are no token of this tokenizer."""
        call_ends = {tokenizer.added_ids[text] for text in call_format.CALL_ENDS if text in tokenizer.added_ids}
        self._unread_ids = self.stop_ids - call_ends
        closings = [text.lstrip() for text in (self.template.follow.get(Role.USER, ""), self.template.closing)]
        ends = [text for closing in closings for text in self.template.stop_texts if closing.startswith(text)]
        self.end_id = tokenizer.added_ids[ends[0]] if ends else min(tokenizer.end_ids, default=None)
        """The end token of the template's own; None when a message ends by nothing."""
        self.call_end_id = self._end_of_calls(stops)
        """The same of a message that calls a tool."""
        # Some tokenizers do not flag as special what their template writes between turns.
        glue = self.template.closing + self.template.opening + self.template.follow.get(Role.USER, "")
        thoughts = {call_format.THINK, call_format.UNTHINK} - set(self.template.stop_texts)
        markers = {text for text in tokenizer.added_ids if text in glue} - thoughts
        markers |= images.tokens if images is not None else set()
        self._control = ControlTokens({*tokenizer.special_texts, *markers})
        self._control_ids = tokenizer.special_ids | {tokenizer.added_ids[text] for text in markers}
        self.images = images
        """The model's image processor; None when it reads text only."""
        self.text_only = text_only
        """Why a model with an image processor is shown no images all the same."""
        self.image_roles = frozenset[Role]() if images is None else image_roles(self.template, images.image_token)
        """Whose images the model is shown."""
        spelled = self.template.opening + self.template.closing
        self.spelled_marks = [text for text in CHATML if text in spelled and text not in tokenizer.added_ids]
        """Marks of the template between turns that are no tokens of this tokenizer, but text of several."""
        self._end_texts = {token: tokenizer.decode([token]) for token in self.stop_ids}
        self._opened: dict[tuple[Any, ...], _Opened] = {}
        self._opened_tokens = 0
        sources = list(tokenizer.templates.values())
        self._clock = clock_formats("".join(sources))
        self.frames: Frames | None = Frames(self.template, sources)
        """None renders every turn by the template."""

    def with_history(self, history: HistoryPolicy) -> "Renderer":
        """The same with another way to take a rewritten history, for trying things out: it keeps no frames."""
        other = copy.copy(self)
        other.history, other.frames, other._opened, other._opened_tokens = history, None, {}, 0
        return other

    def with_kwargs(self, kwargs: dict[str, Any]) -> "Renderer":
        """The same with other arguments to the template."""
        return Renderer(
            self.tokenizer,
            self.call_format,
            history=self.history,
            template_kwargs=kwargs,
            images=self.images,
            text_only=self.text_only,
        )

    def render(self, messages: Sequence[Message], tools: Sequence[JsonSchema], *, reply: bool) -> str:
        """The template's text; `reply` adds the header of an assistant message."""
        return self.template.render(messages, tools, reply=reply)

    def open(self, messages: Sequence[Message], tools: Sequence[JsonSchema]) -> list[int]:
        """The ids of a first prompt without images, assistant header included; siblings have the same."""
        return self.prompt(messages, tools).ids

    def prompt(self, messages: Sequence[Message], tools: Sequence[JsonSchema], media: MediaOf = NO_MEDIA) -> Prompt:
        """A first prompt, assistant header included, and the images at their places; `media` has them prepared."""
        name = None if media else self._name(messages, tools)
        if name is None:
            return self._encode_all(messages, tools, media)
        if (opened := self._opened.get(name)) is None:
            opened = self._keep(name, messages, tools, self._encode_all(messages, tools, media).ids)
        return Prompt(opened.ids.tolist())

    def prompt_known(self, messages: Sequence[Message], tools: Sequence[JsonSchema]) -> "array[int] | None":
        """The ids of a first prompt that was rendered before."""
        name = self._name(messages, tools)
        return opened.ids if name is not None and (opened := self._opened.get(name)) is not None else None

    def remember(self, messages: Sequence[Message], tools: Sequence[JsonSchema], ids: Sequence[int]) -> None:
        """That another process with the same renderer has rendered these to this first prompt."""
        if (name := self._name(messages, tools)) is not None and name not in self._opened:
            self._keep(name, messages, tools, ids)

    def _name(self, messages: Sequence[Message], tools: Sequence[JsonSchema]) -> tuple[object, ...] | None:
        """What tells a first prompt from others; None where the template may write more than is seen here."""
        if self._clock is None:
            return None
        time = [datetime.now().strftime(form) for form in self._clock]
        return (*map(id, messages), None, *map(id, tools), *time)

    def _keep(
        self, name: tuple[object, ...], messages: Sequence[Message], tools: Sequence[JsonSchema], ids: Sequence[int]
    ) -> _Opened:
        while self._opened and self._opened_tokens + len(ids) > MOST_OPENED:
            self._opened_tokens -= len(self._opened.pop(next(iter(self._opened))).ids)
        opened = self._opened[name] = _Opened((*messages, *tools), array("i", ids))
        self._opened_tokens += len(ids)
        return opened

    def extend(
        self,
        history: Sequence[Message],
        assistant: Message,
        completion: Completion,
        replies: Sequence[Message],
        tools: Sequence[JsonSchema],
        media: MediaOf = NO_MEDIA,
    ) -> list[Span]:
        """The tokens that follow `completion` when `replies` answer it, assistant header included.

        `history` is everything before the assistant's message. A turn like an earlier one is filled into that one's
        frame; the self-check at the end compares the whole. Every image token in it belongs to an image of the replies.
        """
        escaper, end = self._escaper(replies), self._end_text(completion)
        escaped = [escaper.escape(reply) for reply in replies] if escaper.hides else replies
        key = None
        if self.frames is not None:
            try:
                key = self.frames.place(history, assistant, end, escaped, tools)
            except NoFrame as reason:
                self.frames.rendered[str(reason)] += 1
        frame = self.frames.find(key) if self.frames is not None and key is not None else None
        if frame is None:
            return self._extend(history, assistant, end, escaped, tools, escaper, key, media)
        words = frame.words(escaped)
        if frame.parts and self.frames is not None and not escaper.hides:
            return self.frames.spans(frame, words, self.tokenizer, self._control_ids)
        return self._spans(*frame.fill(words), escaper, end)

    def _extend(
        self,
        history: Sequence[Message],
        assistant: Message,
        end: str,
        replies: Sequence[Message],
        tools: Sequence[JsonSchema],
        escaper: ControlTokenEscaper,
        key: FrameKey | None,
        media: MediaOf,
    ) -> list[Span]:
        """By the template. Where it adds the same suffix whatever happened in between, only the first prompt of the
        history is rendered, so that a late turn costs no more than an early one."""
        first = self.template.first_prompt(history, replies)
        counts = any(message.images for message in (*history, *replies)) and self._marker()
        context = history if first is None or counts else first  # a template may number images
        reply = RepliedMessage(history, context, assistant, end, replies, tools)
        assistant, after, start = Follower(self.template, self.history).suffix(reply)
        marks: dict[str, Message] = {}
        marked = [mark_texts(reply, marks) for reply in replies]
        tail, whole = after[start:], self.render([*context, assistant, *marked], tools, reply=True)
        skeleton = whole[start:]
        if not whole.startswith(after[:start]) and (filled := marks_for_words(tail, marks)) is not None:
            skeleton, key = filled, None  # it looks at words: a <tool_response> of a user is no question to Qwen3
        demand_marks(skeleton, marks)
        places = list(replies_in(tail, skeleton, marks))
        if key is not None and self.frames is not None:
            self.frames.keep(key, self._frame(key, tail, skeleton, list(marks), replies, end))
        return self._spans(tail, places, escaper, end, replies, media)

    def _end_of_calls(self, stops: Sequence[str]) -> int | None:
        """What the template has after a call, else what the format says, else what ends every message."""
        added: dict[str, int] = self.tokenizer.added_ids
        try:
            calling = self.template.assistant(self.call_format.render_call(CALL))
            after, start = self.template.locate([HELLO], calling, "", [RESULT], ())
        except TemplateError:
            start = None
        tail = "" if start is None else after[start:].lstrip()
        ends = [text for text, token in added.items() if token in self.stop_ids and tail.startswith(text)]
        if ends:
            return added[max(ends, key=len)]
        return added[stops[0]] if stops else self.end_id

    def _frame(
        self, key: FrameKey, tail: str, skeleton: str, marks: Sequence[str], replies: Sequence[Message], end: str
    ) -> Frame | None:
        """The frame of a turn that the template has rendered, unless it shows other words than were replied."""
        glue = []
        for mark in marks:
            before, separator, skeleton = skeleton.partition(mark)
            glue.append(before)
            if not separator:  # in another order than they were given
                return None
        frame = Frame((*glue, skeleton), key.slots())
        words = frame.words(replies)
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

    def check(
        self, ledger: Ledger, messages: Sequence[Message], tools: Sequence[JsonSchema], media: MediaOf = NO_MEDIA
    ) -> RenderCheck:
        """The recorded tokens and images against one full render of the final messages."""
        encode = functools.partial(self._encode_all, media=media)
        verbatim, bare = self.history is HistoryPolicy.verbatim, self.history is HistoryPolicy.auto
        selfcheck = SelfCheck(self.tokenizer, self.template, self.stop_ids, encode, verbatim, bare)
        return selfcheck.check(ledger, messages, tools)

    # --- the parts of an extension ----------------------------------------------------------------------------

    def _escaper(self, messages: Sequence[Message], tools: Sequence[JsonSchema] = ()) -> ControlTokenEscaper:
        texts: list[str] = []
        for message in messages:
            texts += (message.text, message.name or "")
        texts += texts_in(tools)
        return ControlTokenEscaper(self._control, texts)

    def _encode_all(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonSchema],
        media: MediaOf,
        words: str = "",
        *,
        reply: bool = True,
    ) -> Prompt:
        """One render in tokens, and words after it. What users and tools wrote is text, whatever it spells.

        Without `reply` it ends where the calls of the last message do.
        """
        escaper, images = self._escaper(messages, tools), images_in(messages)
        escaped = [escaper.escape(message) for message in messages] if escaper.hides else messages
        if images:
            spelled = SpelledMarkers(self._marker(), escaped)
            escaped = [spelled.hide(message) for message in escaped]
        text = self.render(escaped, escaper.escape_tools(tools), reply=reply)
        if not reply:
            text = text[: self.template.closing_start(text, structured=True)]
        if not images:
            text, cuts = escaper.unescape(text)
            return Prompt(self.tokenizer.encode(text + words, cuts=cuts).ids)
        markers = find_markers(text, self._marker(), images)
        text, cuts = escaper.unescape(spelled.restore(text))
        encoding = self.tokenizer.encode(text + words, cuts=cuts)
        expanded, spans = expand(encoding, markers, media_of(images, media))
        return Prompt(expanded.ids, tuple(spans))

    def _marker(self) -> str:
        """What the template writes for an image."""
        if self.images is None:
            why = self.text_only or "its folder has no image processor"
            raise TemplateError(f"a message holds an image, and the model reads text only: {why}")
        return self.images.image_token

    def _end_text(self, completion: Completion) -> str:
        return self._end_texts.get(int(completion.token_ids[-1]), "") if len(completion.token_ids) else ""

    def _spans(
        self,
        tail: str,
        places: Sequence[Characters],
        escaper: ControlTokenEscaper,
        end: str,
        replies: Sequence[Message] = (),
        media: MediaOf = NO_MEDIA,
    ) -> list[Span]:
        """Tokens of the tail: what a tool or user wrote, and his images, keep their origin; the rest is the template's.
        `replies` are the messages in it."""
        skip = written_already(tail, end)
        text, cuts = escaper.unescape(tail)
        encoding = self.tokenizer.encode(text[skip:], cuts=[cut - skip for cut in cuts], after=end if skip else "")
        spans: list[Span] = []
        control, images = self._control_ids, images_in(replies)
        if images:
            markers, blocks = find_markers(tail, self._marker(), images), media_of(images, media)
            places = with_images(places, markers, len(self._marker()), replies)
            encoding, _ = expand(encoding, [at - skip for at in markers], blocks)
            control = control.difference(*(block.token_ids.tolist() for block in blocks))
        moved = [(start - skip, stop - skip, origin) for start, stop, origin in places] if skip else places
        add_spans(spans, encoding, moved, control)
        return spans


def image_roles(template: ChatTemplate, marker: str) -> frozenset[Role]:
    """Whose images it shows, each once and where its message stands, with the marker of an image."""
    picture, answer = Image("data:,"), template.assistant(f"{template.call_format.ANSWER}yes")
    calling = template.assistant(template.call_format.render_call(CALL))
    question = Message(Role.USER, (Text("a"), picture, Text("b"), picture))
    talks: dict[Role, list[Message]] = {
        Role.USER: [question, answer, question],
        Role.TOOL: [HELLO, calling, replace(RESULT, content=question.content)],
        Role.SYSTEM: [replace(question, role=Role.SYSTEM), HELLO],
    }
    return frozenset(role for role, talk in talks.items() if _counts_images(template, talk, marker))


def _counts_images(template: ChatTemplate, talk: Sequence[Message], marker: str) -> bool:
    images = 0
    for number, message in enumerate(talk):
        images += len(message.images)
        try:
            text = template.render(talk[: number + 1], (), reply=message is talk[-1])
        except TemplateError:
            if message is talk[-1]:
                return False
            continue
        if text.count(marker) != images:
            return False
    return True
