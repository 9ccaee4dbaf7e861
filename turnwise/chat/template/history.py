"""What to do where a chat template shows what was said otherwise once a reply follows: refuse, keep, or follow it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from turnwise.chat.control_tokens import fresh_mark, shared, with_texts
from turnwise.chat.template.chat_template import ChatTemplate
from turnwise.chat.template.message_forms import CallsHidden
from turnwise.config.choices import HistoryPolicy
from turnwise.errors import TemplateError
from turnwise.types import JsonSchema, Message


class HistoryRewritten(Exception):
    """Raised inside `extend` when a new sequence must follow the rewritten history; the caller reopens."""


class RewriteRefused(TemplateError):
    """The template rewrites history, and `HistoryPolicy.refuse` wants none of it."""


class WordsRefused(TemplateError):
    """The template cannot show what the policy wrote once it is replied to: its doing, and the end of its episode."""


@dataclass(frozen=True, slots=True)
class RepliedMessage:
    """An assistant's message that is replied to."""

    history: Sequence[Message]
    """All before it."""
    context: Sequence[Message]
    """As much of that as the suffix depends on."""
    assistant: Message
    end: str
    """The end token the policy wrote, if any."""
    replies: Sequence[Message]
    tools: Sequence[JsonSchema]


@dataclass(frozen=True, slots=True)
class Follower:
    """One template, and what to do when it rewrites."""

    template: ChatTemplate
    history: HistoryPolicy

    def suffix(self, reply: RepliedMessage) -> tuple[Message, str, int]:
        """(the assistant's message as it is put to the template, the whole text, where its words end in it).

        HistoryRewritten where a new sequence must follow.
        """
        arguments = reply.context, reply.assistant, reply.end, reply.replies, reply.tools
        try:
            after, start = self.template.locate(*arguments)
            loses_a_tag = start is not None and self._loses_a_tag(reply, after)
            if start is not None and not loses_a_tag:
                return reply.assistant, after, start
            if loses_a_tag or self._follows(reply, after):
                self._demand_shown(reply)
                raise HistoryRewritten
            return self.template.marked_tail(reply.context, reply.assistant, reply.replies, reply.tools)
        except TemplateError as error:
            if self._can_follow(error, reply):
                raise HistoryRewritten from error
            refused = self.template.rejects_words(*arguments)
            if not isinstance(error, RewriteRefused):  # a thought that is lost by every one who thinks is not theirs
                refused = refused or self.template.renders_plain(*arguments[:2], *arguments[3:])
            if refused:
                raise WordsRefused(f"a message of the policy does not fit the chat template: {error}") from error
            raise

    def _follows(self, reply: RepliedMessage, after: str) -> bool:
        """Whether a new sequence follows what became of the history, else the sampled tokens are kept."""
        if self.history is HistoryPolicy.refuse:
            before = self.template.render(reply.context, reply.tools, reply=True)
            raise RewriteRefused(_difference(before + reply.assistant.text + reply.end, after))
        if self.history is HistoryPolicy.auto:
            return not self.template.keeps_all_words(
                reply.context, reply.assistant, reply.end, reply.replies, reply.tools
            )
        return self.history is HistoryPolicy.segment

    def _loses_a_tag(self, reply: RepliedMessage, after: str) -> bool:
        """Whether a <think> that the header had opened already, and the policy wrote again, is shown once only."""
        template, text = self.template, reply.assistant.text
        again = template.thought and text.lstrip().startswith(template.call_format.THINK)
        if (
            not again
            or self.history not in (HistoryPolicy.auto, HistoryPolicy.segment)
            or template.is_structured(reply.assistant)
        ):
            return False
        header = template.render(reply.context, reply.tools, reply=True)
        appended = "".join(after.split()).startswith("".join((header + text).split()))
        return header.endswith(template.thought) and not appended

    def _can_follow(self, error: TemplateError, reply: RepliedMessage) -> bool:
        """Whether the template can show the whole all the same."""
        if self.history not in (HistoryPolicy.auto, HistoryPolicy.segment) or isinstance(error, CallsHidden):
            return False
        try:
            self._demand_shown(reply)
        except TemplateError:
            return False
        return True

    def _demand_shown(self, reply: RepliedMessage) -> None:
        marks: dict[str, Message] = {}
        marked = [mark_texts(message, marks) for message in reply.replies]
        demand_marks(self.template.render([*reply.history, reply.assistant, *marked], reply.tools, reply=True), marks)


def mark_texts(reply: Message, marks: dict[str, Message]) -> Message:
    """A reply with a mark in the place of each of its texts; `marks` is told what each stands for."""

    def mark(text: str) -> str:
        if not text:
            return ""
        name = f"{fresh_mark(())}{len(marks)}X"
        marks[name] = reply if text == reply.text else Message(reply.role, text)
        return name

    return replace(reply, content=with_texts(reply, mark))


def demand_marks(text: str, marks: dict[str, Message]) -> None:
    """TemplateError where a text lacks what one of the marks stands for."""
    for mark, reply in marks.items():
        if mark not in text:
            raise TemplateError(f"the chat template does not show what a {reply.role} replies")


def marks_for_words(tail: str, marks: dict[str, Message]) -> str | None:
    """A text with each mark in the place of the words that it stands for; None where it does not have them in order."""
    parts, position = list[str](), 0
    for mark, reply in marks.items():
        words = reply.text.strip()
        start = tail.find(words, position)
        if start < 0:
            return None
        parts += (tail[position:start], mark)
        position = start + len(words)
    return "".join((*parts, tail[position:]))


def _difference(before: str, after: str) -> str:
    at = max(shared(before, after) - 16, 0)  # with a little of what is still the same
    return (
        "the chat template rewrites history: once a reply follows, earlier text changes from "
        f"{before[at : at + 60]!r} to {after[at : at + 60]!r}. Training would then use other tokens than were "
        "sampled. Use a template that only appends (chat.template=chatml_hermes), or choose chat.history=auto (open a "
        "second sequence where words of the policy change) or chat.history=verbatim (keep the sampled tokens)"
    )
