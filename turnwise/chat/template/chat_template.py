"""Messages to text: one chat template, and what trying it out tells about it."""

import contextlib
import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from turnwise.chat.calls.tool_format import ToolFormat
from turnwise.chat.control_tokens import fresh_mark
from turnwise.chat.template.message_forms import CallForm, CallsHidden, ContentForm, ThoughtForm, apart, spelled, squash
from turnwise.chat.tokenizer import Tokenizer
from turnwise.errors import TemplateError
from turnwise.types import Image, JsonSchema, Message, Role, Text, ToolCall

_MARK = fresh_mark(())
_REFUSED, _KEPT = "\0refused", "\0kept"
HELLO = Message(Role.USER, "hello")
ANSWER = Message(Role.ASSISTANT, "", reasoning="hm", answer="yes")
CALL = ToolCall("t000c0000", "probe", {"x": 1})
RESULT = Message(Role.TOOL, "1", tool_call_id=CALL.id, name=CALL.name)


class ChatTemplate:
    """The tokenizer's template, fed with our messages."""

    def __init__(self, tokenizer: Tokenizer, call_format: ToolFormat, kwargs: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self.call_format = call_format
        self.kwargs = kwargs
        self.call_form, self._thought_form = CallForm.RAW, ThoughtForm.WRITTEN
        think, unthink = re.escape(call_format.THINK), re.escape(call_format.UNTHINK)
        self._empty_thought = re.compile(rf"{think}\s*{unthink}\s*")
        self._thinks_nothing = re.compile(rf"{think}\s*{unthink}|^\s*{unthink}")
        self._writes_answer = False
        self._content_form = self._choose_content_form()
        self.opening = self.render([Message(Role.USER, _MARK)], (), reply=True).rpartition(_MARK)[2]
        """What stands between a user's words and the assistant's."""
        start = self.opening.rfind(self.call_format.THINK)
        self.thought = self.opening[start:] if start > self.opening.rfind(self.call_format.UNTHINK) else ""
        """The end of the opening from an open <think> on; empty when there is none."""
        self._writes_answer = self._writes_before_answers()
        self.call_form = self._choose_call_form()
        self.closing = self._following([], reply=False)
        """What closes an assistant message that nothing follows."""
        self.call_closing = self._closing_of_calls()
        """What closes a message whose calls the template writes; empty when it leaves such a message open."""
        self.follow = self._followers()
        """What stands after an assistant message when a user or a tool replies, by role."""
        self._thought_form = self._choose_thought_form()
        self._local = self._local_roles()

    def render(self, messages: Sequence[Message], tools: Sequence[JsonSchema], *, reply: bool) -> str:
        """The template's text; `reply` adds the header of an assistant message."""
        entries = [self._entry(message) for message in messages]
        try:
            return self._tokenizer.apply_template(entries, list(tools), reply, self.kwargs)
        except Exception as error:  # a template is a program of the model's authors
            roles = ", ".join(message.role for message in messages)
            bare = "" if tools else " without tools"
            raise TemplateError(f"the chat template cannot render the roles [{roles}]{bare}: {error}") from error

    def first_prompt(self, history: Sequence[Message], replies: Sequence[Message]) -> Sequence[Message] | None:
        """The messages before the first turn, when the suffix depends on no others; else None."""
        for reply in replies:
            if reply.role not in self._local:
                return None
        has_user = False
        for number, message in enumerate(history):
            if message.role is Role.ASSISTANT:
                return history[:number] if has_user else None
            has_user = has_user or message.role is Role.USER
        return history if has_user else None

    def locate(
        self,
        context: Sequence[Message],
        assistant: Message,
        end: str,
        replies: Sequence[Message],
        tools: Sequence[JsonSchema],
        *,
        without: re.Pattern[str] | None = None,
    ) -> tuple[str, int | None]:
        """The text with the replies, and where the assistant's words end in it; None when the template changed them.

        `end` is the end token the policy wrote, if any. White space is not held against a template: many trim. What
        matches `without` is left out of all texts.
        """

        def rendered(messages: Sequence[Message], *, reply: bool) -> str:
            text = self.render(messages, tools, reply=reply)
            return text if without is None else without.sub("", text)

        after = rendered([*context, assistant, *replies], reply=True)
        header, words = rendered(context, reply=True), assistant.text
        structured = self.is_structured(assistant)
        if not structured and after.startswith(header + words):
            start = len(header) + len(words)
        else:
            before, opened = rendered([*context, assistant], reply=False), header.rstrip()
            end_of_words = self.closing_start(before, structured=structured)
            if end_of_words is None or end_of_words < len(opened) or not before.startswith(opened):
                return after, None
            start = end_of_words
            unchanged = structured or squash(before[len(opened) : start]) == squash(self._once(header, words))
            if not (unchanged and after.startswith(before[:start])):
                return after, None
        if structured:
            self._demand_every_call(context, assistant, tools)
        closings = (self.closing, self.follow.get(replies[0].role, "") if replies else "", self.call_closing)
        expected = end and any(closing.lstrip().startswith(end) for closing in closings)
        return after, None if expected and not after[start:].lstrip().startswith(end) else start

    def keeps_all_words(
        self,
        context: Sequence[Message],
        assistant: Message,
        end: str,
        replies: Sequence[Message],
        tools: Sequence[JsonSchema],
    ) -> bool:
        """Whether nothing changes but empty thoughts that the template itself wrote, or writes now."""
        spoken = [message for message in (*context, assistant) if message.role is Role.ASSISTANT]
        if any(self._thinks_nothing.search(message.text) for message in spoken):  # they may be the policy's own
            return False
        return self.locate(context, assistant, end, replies, tools, without=self._empty_thought)[1] is not None

    def bare(self, text: str) -> str:
        """A text without empty thoughts."""
        return self._empty_thought.sub("", text)

    def marked_tail(
        self,
        context: Sequence[Message],
        assistant: Message,
        replies: Sequence[Message],
        tools: Sequence[JsonSchema],
    ) -> tuple[Message, str, int]:
        """(a message in the assistant's place, the text with it, where its words end), whatever was rewritten."""
        mark = fresh_mark(message.text for message in (*context, *replies))
        calls = tuple(replace(call, arguments={"x": mark}) for call in assistant.tool_calls)
        words = "" if self.is_structured(assistant) else mark  # some templates show words after what the tool replied
        marked = replace(assistant, content=words, answer=words, reasoning=None, tool_calls=calls)
        text = self.render([*context, marked, *replies], tools, reply=True)
        head, separator, tail = text.rpartition(mark)
        start = len(head) + len(mark)
        if not separator or (mark in head and not self.is_structured(marked)):
            raise TemplateError("the chat template drops or repeats an assistant message that a reply follows")
        if self.is_structured(marked):  # the mark stands inside the last call, whose brackets close after it
            rest = self.render([*context, marked], tools, reply=False).rpartition(mark)[2]
            brackets = rest[: self.closing_start(rest, structured=True)]
            if not tail.startswith(brackets):
                raise TemplateError("the chat template writes a tool call otherwise once a reply follows")
            start += len(brackets)
        return marked, text, start

    def rejects_words(
        self,
        context: Sequence[Message],
        assistant: Message,
        end: str,
        replies: Sequence[Message],
        tools: Sequence[JsonSchema],
    ) -> bool:
        """Whether it is these words that the template refuses or rewrites, and not every message of their kind."""
        answers = replies[:1] if assistant.tool_calls else replies  # a typical message makes one call
        with contextlib.suppress(TemplateError):
            return self.locate(context, self._typical(assistant), end, answers, tools)[1] is not None
        return False

    def renders_plain(
        self, context: Sequence[Message], assistant: Message, replies: Sequence[Message], tools: Sequence[JsonSchema]
    ) -> bool:
        """Whether the replies could be shown had the assistant said something plain, without a thought."""
        answers = replies[:1] if assistant.tool_calls else replies
        plain = self._typical(replace(assistant, reasoning=None))
        with contextlib.suppress(TemplateError):
            return bool(self.render([*context, plain, *answers], tools, reply=True))
        return False

    @property
    def stop_texts(self) -> list[str]:
        """The added tokens that close an assistant message: when it is the last, before a user, before a tool."""
        closings = [text.lstrip() for text in (self.closing, self.call_closing, *self.follow.values())]
        return [text for text in self._tokenizer.added_ids if any(closing.startswith(text) for closing in closings)]

    def _entry(self, message: Message) -> dict[str, Any]:
        """A message as templates expect it."""
        if message.tool_calls and message.answer is None and self.hides_calls:
            message = spelled(message, self.call_format)
        text = message.text
        entry: dict[str, Any] = {"role": message.role.value, "content": text}
        written = message.answer is not None  # by the policy, whose text spells reasoning and calls
        if message.tool_calls and (self.call_form is CallForm.STRUCTURED or not written):
            entry["content"] = message.visible
            entry["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name or "unreadable", "arguments": call.arguments},
                }
                for call in message.tool_calls
            ]
            if message.reasoning is not None:
                entry |= apart(message.reasoning)
        elif not written and message.reasoning is not None:
            entry |= apart(message.reasoning)
        elif written and self._writes_answer and self.call_format.ANSWER in text:
            entry["content"] = text.rpartition(self.call_format.ANSWER)[2]
            entry |= {} if message.reasoning is None else apart(message.reasoning)
        elif written and message.reasoning is not None:
            if self._thought_form is ThoughtForm.APART:
                words = text.rpartition(self.call_format.UNTHINK)[2]
                entry |= {**apart(message.reasoning), "content": words}
            elif self._thought_form is ThoughtForm.OPENED:
                again = text.lstrip().startswith(self.call_format.THINK)  # once is enough: the policy wrote it too
                entry["content"] = text.lstrip() if again else self.thought + text
        if message.images:
            entry["content"] = [
                {"type": "text", "text": part.text} if isinstance(part, Text) else {"type": "image"}
                for part in message.content
                if isinstance(part, Text | Image)
            ]
        elif self._content_form is ContentForm.PARTS:
            entry["content"] = [{"type": "text", "text": entry["content"]}]
        named = {"tool_call_id": message.tool_call_id, "name": message.name} if message.role is Role.TOOL else {}
        return entry | {key: value for key, value in named.items() if value is not None}

    # --- trying the template out ------------------------------------------------------------------------------

    def _choose_content_form(self) -> ContentForm:
        """The first form in which it shows what a user says."""
        for form in ContentForm:
            self._content_form = form
            with contextlib.suppress(TemplateError):
                if _MARK in self.render([Message(Role.USER, _MARK)], (), reply=True):
                    return form
        return ContentForm.STRING

    def is_structured(self, message: Message) -> bool:
        """Whether the template itself writes this message's calls."""
        return bool(message.tool_calls) and self.call_form is CallForm.STRUCTURED

    def closing_start(self, before: str, *, structured: bool) -> int | None:
        """Where the last assistant message of a text is closed; None when that cannot be told.

        A template may close a message with calls otherwise than another, or not at all: a result follows in it.
        """
        if before.endswith(self.closing) and (self.closing or not structured):
            return len(before) - len(self.closing)
        if structured:
            return len(before) - len(self.call_closing) if before.endswith(self.call_closing) else None
        return max((before.rfind(stop) for stop in self.stop_texts if stop in before), default=len(before))

    def _closing_of_calls(self) -> str:
        """The control token that ends a message with a call, and white space after it."""
        if self.call_form is not CallForm.STRUCTURED:
            return ""
        text = self.render([HELLO, self.assistant(self.call_format.render_call(CALL))], (), reply=False)
        if self.closing and text.endswith(self.closing):
            return self.closing
        bare, special = text.rstrip(), self._tokenizer.special_texts
        ends = [token for token in self._tokenizer.added_ids if bare.endswith(token)]
        # An ordinary token like </tool_call> closes a bracket of the call, not the message.
        ends = [token for token in ends if token in special or not token.startswith("</")]
        return text[len(bare) - len(max(ends, key=len)) :] if ends else ""

    @functools.cached_property
    def hides_calls(self) -> bool:
        """Whether it drops the calls of a message that is no text of the policy's."""
        asking = Message(Role.ASSISTANT, "", (replace(CALL, arguments={"x": _MARK}),), answer="")
        form, self.call_form = self.call_form, CallForm.STRUCTURED
        try:
            return _MARK not in self.render([HELLO, asking, RESULT], (), reply=False)
        except TemplateError:
            return True
        finally:
            self.call_form = form

    def _demand_every_call(self, context: Sequence[Message], assistant: Message, tools: Sequence[JsonSchema]) -> None:
        """A call that the template drops would be answered without having been asked."""
        mark = fresh_mark(message.text for message in (*context, assistant))
        marks = [f"{mark}{number}X" for number in range(len(assistant.tool_calls))]
        calls = tuple(
            replace(call, arguments={"x": mark}) for call, mark in zip(assistant.tool_calls, marks, strict=True)
        )
        text = self.render([*context, replace(assistant, tool_calls=calls)], tools, reply=False)
        if [text.count(mark) for mark in marks] != [1] * len(marks) or sorted(marks, key=text.index) != marks:
            raise CallsHidden("the chat template does not show every tool call of a message once and in order")

    def _once(self, header: str, words: str) -> str:
        """Words without the <think> that the header had opened already."""
        doubled = self.thought and header.endswith(self.thought) and words.lstrip().startswith(self.call_format.THINK)
        return words.lstrip().removeprefix(self.call_format.THINK) if doubled else words

    def _writes_before_answers(self) -> bool:
        """Whether it writes before an assistant's words what the model would write before its answer."""
        answer = self.call_format.ANSWER
        if not answer:
            return False
        text = self.render([HELLO, Message(Role.ASSISTANT, _MARK)], (), reply=False)
        return text.partition(_MARK)[0].endswith(answer) and not self.opening.endswith(answer)

    def _choose_call_form(self) -> CallForm:
        """The first form in which the template shows what tools reply, the second time too, and goes on with a user."""
        calls = [self.call_format.render_call(CALL), self.call_format.render_call(replace(CALL, arguments={"x": 2}))]
        callings = [self.call_format.parse(text, turn=turn, in_reasoning=False) for turn, text in enumerate(calls)]
        rounds = [
            [ask, replace(RESULT, content=f"{_MARK}{turn}", tool_call_id=(ask.tool_calls or (CALL,))[0].id)]
            for turn, ask in enumerate(callings)
        ]
        both = [HELLO, *rounds[0], *rounds[1]]
        # A template that writes what comes before an answer would write it before the text of a call too.
        forms = list(CallForm) if not self._writes_answer else [CallForm.STRUCTURED]
        for talk in ([*both, self.assistant(f"{self.call_format.ANSWER}yes"), HELLO], both, both[:3]):
            for form in forms:
                self.call_form = form
                with contextlib.suppress(TemplateError):
                    text = self.render(talk, (), reply=True)
                    if all(message.text in text for message in talk if message.role is Role.TOOL):
                        return form
        return CallForm.RAW  # conversations without tools still work; a tool's reply is refused when it comes

    def _choose_thought_form(self) -> ThoughtForm:
        """The first form in which reasoning stands in the text as it was written, once a tool or a user replies."""
        answer, ask = (self._typical(replace(ANSWER, tool_calls=calls)) for calls in ((), (CALL,)))
        for form in ThoughtForm:
            self._thought_form = form
            for assistant, reply in ((ask, RESULT), (answer, HELLO)):
                if self._suffix([HELLO], assistant, [reply]) not in (None, _REFUSED):
                    return form
        return ThoughtForm.WRITTEN

    def _following(self, replies: Sequence[Message], *, reply: bool) -> str:
        """What stands after an assistant's words."""
        text = self.render([HELLO, Message(Role.ASSISTANT, _MARK), *replies], (), reply=reply)
        if text.count(_MARK) != 1:
            raise TemplateError("the chat template does not show an assistant message exactly once")
        return text.partition(_MARK)[2]

    def _followers(self) -> dict[Role, str]:
        followers = {}
        for message in (HELLO, RESULT):
            with contextlib.suppress(TemplateError):  # no tools, or none after plain text
                followers[message.role] = self._following([message], reply=True)
        return followers

    def _local_roles(self) -> frozenset[Role]:
        """Whose replies get the same suffix late in a conversation as right after the first prompt.

        A template may count rounds, name only the first tool result, move words that stand before a call, or drop
        reasoning once a user speaks again: where it rewrites anything, what came before matters.
        """
        plain, thought = self.assistant(self.call_format.ANSWER + "yes"), self._typical(ANSWER)
        ask = self.assistant(self.call_format.render_call(CALL))
        announced = self.assistant(self.call_format.ANSWER + "Well.\n" + self.call_format.render_call(CALL))
        pondered = self._typical(replace(ANSWER, tool_calls=(CALL,)))
        with_tools = [HELLO, pondered, RESULT, plain, HELLO, thought, HELLO, ask, RESULT, ask, RESULT]
        users_only = [HELLO, thought, HELLO, plain, HELLO]
        histories = [with_tools[:3], with_tools[:5], with_tools, users_only[:3], users_only, [HELLO, announced, RESULT]]
        possible = [history for history in histories if self._suffix(history, plain, []) != _REFUSED]
        local = {Role.TOOL, Role.USER}
        exchanges = ((plain, [HELLO]), (thought, [HELLO]), (ask, [RESULT]), (pondered, [RESULT, RESULT]))
        for assistant, replies in exchanges:
            short = self._fate([HELLO], assistant, replies)
            if short is None or any(self._fate(history, assistant, replies) != short for history in possible):
                local.discard(replies[0].role)
        return frozenset(local)

    def _suffix(self, history: Sequence[Message], assistant: Message, replies: Sequence[Message]) -> str | None:
        try:
            after, start = self.locate(history, assistant, "", replies, ())
        except TemplateError:
            return _REFUSED
        return None if start is None else after[start:]

    def _fate(self, history: Sequence[Message], assistant: Message, replies: Sequence[Message]) -> str | None:
        """The suffix, told apart from one after empty thoughts that come and go; None when more is rewritten."""
        suffix = self._suffix(history, assistant, replies)
        with contextlib.suppress(TemplateError):
            if suffix is None and self.keeps_all_words(history, assistant, "", replies, ()):
                _, text, start = self.marked_tail(history, assistant, replies, ())
                return _KEPT + text[start:]
        return suffix

    def _typical(self, assistant: Message) -> Message:
        """A message of the same kind that says nothing unusual."""
        is_open = bool(self.thought)
        thought = "" if assistant.reasoning is None else self.call_format.render_thought("hm", is_open=is_open)
        return self.assistant(
            thought + (self.call_format.render_call(CALL) if assistant.tool_calls else f"{self.call_format.ANSWER}yes")
        )

    def assistant(self, text: str) -> Message:
        """What the policy would have said with this text."""
        is_open = bool(self.thought) and self.call_format.UNTHINK in text
        return self.call_format.parse(text, turn=0, in_reasoning=is_open)
