"""Frames found and kept: a turn that is like an earlier one is filled into its frame, all others the template renders.

What makes two turns alike is the key: the first prompt but for its question, the tools, how the assistant's message
comes to the template, who replies, and what the texts have of the words that the template looks for (`kinds.py`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from turnwise.chat.spans import Span
from turnwise.chat.template.analysis import compared_words
from turnwise.chat.template.chat_template import ChatTemplate
from turnwise.chat.template.reply_frame import Frame, Slot
from turnwise.chat.template.text_changes import Kinds, Manner, MessageKind
from turnwise.chat.tokenizer import Tokenizer
from turnwise.types import JsonSchema, Message, Role

MOST = 4096
"""Frames, first prompts, and replies in tokens that are kept; beyond it they are found anew."""
LONGEST_SAID = 500
"""Characters of replies whose tokens are kept."""
MOST_KINDS = 256
"""Shapes of first prompts, each with its tools."""

Key = tuple[Any, ...]


class NoFrame(Exception):
    """Why a turn must be rendered by the template."""


@dataclass(frozen=True, slots=True)
class _Opening:
    """A first prompt with its tools, known by the identity of its messages, which are kept for that."""

    messages: tuple[Message, ...]
    kinds: Kinds
    number: int
    """The same for those that are alike: less to compare than what makes them so."""


class FrameKey(NamedTuple):
    """Where the frame of a turn is kept: what it depends on."""

    opening: int
    end: str
    words: Key
    replies: tuple[Key, ...]

    def slots(self) -> tuple[Slot, ...]:
        """A slot for each reply that has words of its own."""
        return tuple(
            Slot(number, role, trims=bool(trims))
            for number, (role, _, _, trims, features) in enumerate(self.replies)
            if features
        )


class Frames:
    """The frames of one template, whose program is in `sources`."""

    def __init__(self, template: ChatTemplate, sources: Sequence[str]) -> None:
        self.filled = 0
        """Turns that were filled into a frame."""
        self.repeated = 0
        """Those of them whose words had been filled into it before."""
        self.rendered: Counter[str] = Counter()
        """Turns that the template rendered, by reason."""
        self._template = template
        self._words = tuple(sorted({word for source in sources for word in compared_words(source)}))
        self._frames: dict[FrameKey, Frame | None] = {}
        self._openings: dict[Key, _Opening] = {}
        self._kinds: dict[Key, Kinds] = {}
        self._said: dict[Key, tuple[Frame, list[Span]]] = {}
        """With the frame, which is known by its identity and must outlive its name."""
        self._numbers: dict[Key, int] = {}
        self._counted = 0

    def place(
        self,
        history: Sequence[Message],
        assistant: Message,
        end: str,
        replies: Sequence[Message],
        tools: Sequence[JsonSchema],
    ) -> FrameKey:
        """Where the frame of this turn is kept; NoFrame when there can be none."""
        prompt = self._template.first_prompt(history, replies)
        if prompt is None or not replies:
            raise NoFrame("earlier messages matter")
        opening = self._opening(prompt, tools)
        features = tuple([self._reply(opening.kinds, reply) for reply in replies])
        return FrameKey(opening.number, end, self._words_of(opening.kinds, assistant, replies[0].role), features)

    def find(self, key: FrameKey) -> Frame | None:
        """The frame of a turn; None when the template must say."""
        frame = self._frames.get(key)
        if frame is not None:
            self.filled += 1
        else:
            self.rendered["its frame is not known yet" if key not in self._frames else "it has no frame"] += 1
        return frame

    def spans(
        self, frame: Frame, words: Sequence[str], tokenizer: Tokenizer, control_ids: frozenset[int]
    ) -> list[Span]:
        """The frame's tokens with these words, kept for the next time: siblings are told the same, and so are all who
        make a common mistake or meet a user of few words."""
        name = (id(frame), *words)
        cached = self._said.get(name)
        if cached is not None:
            self.repeated += 1
            return cached[1]
        spans = frame.spans(words, tokenizer, control_ids)
        if sum(map(len, words)) <= LONGEST_SAID:
            if len(self._said) >= MOST:
                self._said.clear()
            self._said[name] = (frame, spans)
        return spans

    def keep(self, key: FrameKey, frame: Frame | None) -> None:
        """Keep the frame of a turn, or that it has none."""
        if len(self._frames) >= MOST:
            self._frames.clear()
        self._frames[key] = frame

    # --- what a frame depends on ------------------------------------------------------------------------------

    def _opening(self, prompt: Sequence[Message], tools: Sequence[JsonSchema]) -> _Opening:
        name = (*map(id, prompt), None, *map(id, tools))
        opening = self._openings.get(name)
        if opening is not None:
            return opening
        if any(not isinstance(message.content, str) for message in prompt):
            raise NoFrame("the prompt is not text only")
        shape = (*(message.role for message in prompt), *map(id, tools))
        if shape not in self._kinds:
            if len(self._kinds) >= MOST_KINDS:  # they keep the tools that others know by identity
                for cache in (self._kinds, self._numbers, self._openings, self._frames):
                    cache.clear()
            self._kinds[shape] = Kinds(self._template, self._words, prompt, tools)
        kinds = self._kinds[shape]
        last = max(number for number, message in enumerate(prompt) if message.role is Role.USER)
        features = [
            self._text_features(message.text, kinds.question)
            if number == last and kinds.question is not None
            else (message.text, message.name, message.tool_call_id)
            for number, message in enumerate(prompt)
        ]
        if len(self._openings) >= MOST:
            self._openings.clear()
        if len(self._numbers) >= MOST:
            self._numbers.clear()  # what is counted anew has its frames found anew
        key = (shape, *features)
        if key not in self._numbers:
            self._counted += 1
            self._numbers[key] = self._counted
        self._openings[name] = _Opening(tuple(prompt), kinds, self._numbers[key])
        return self._openings[name]

    def _reply(self, kinds: Kinds, reply: Message) -> Key:
        text, role = reply.content, reply.role
        if role not in (Role.TOOL, Role.USER) or not isinstance(text, str):
            raise NoFrame(f"a {role} replies, or not with text only")
        kind = kinds.reply(role)
        if kind is None:
            raise NoFrame(f"what a {role} replies is not shown as written")
        features: Key = ()
        if text:
            bare = text.strip()
            if not bare or (kind.trims is None and len(bare) < len(text)):
                raise NoFrame(f"what a {role} replies has white space at its edges")
            features = self._text_features(bare, kind) if kind.trims else self._text_features(text, kind)[1:]
        named = reply.tool_call_id if kinds.shows_ids else reply.tool_call_id is None
        return (role, reply.name, named, kind.trims, features)

    def _words_of(self, kinds: Kinds, assistant: Message, before: Role) -> Key:
        template, text = self._template, assistant.content
        if assistant.answer is None or not isinstance(text, str):
            raise NoFrame("the assistant's message was not read from its text")
        structured, thinks = template.is_structured(assistant), assistant.reasoning is not None
        think, unthink = template.call_format.THINK, template.call_format.UNTHINK
        tags = (text.count(think), text.count(unthink))
        is_open = thinks and bool(template.thought) and not text.lstrip().startswith(think)
        manner = Manner(structured, bool(assistant.tool_calls), thinks, is_open, before)
        kind = kinds.said(manner)
        if kind is None:
            raise NoFrame("what the assistant says is not shown as written")
        calls: Key = ()
        if structured:
            calls = tuple((call.id if kinds.shows_ids else None, call.name) for call in assistant.tool_calls)
        features = [self._text_features(text, kind)]
        if structured or thinks:
            features += [
                self._text_features(assistant.answer, kind),
                self._text_features(assistant.reasoning or "", kind),
            ]
        return (manner, tags, calls, *features)

    def _text_features(self, text: str, kind: MessageKind) -> Key:
        """What a template can see in a text: white space at its edges, and words that it mentions."""
        bare = text.strip()
        edges = ("", "")
        if len(bare) < len(text):
            start = text.find(bare) if bare else len(text)
            edges = (text[:start], text[start + len(bare) :])
        words = self._words
        first = tuple(word for word in words if text.startswith(word)) if text.startswith(words) else ()
        last = tuple(word for word in words if text.endswith(word)) if text.endswith(words) else ()
        telling = [word for word in kind.telling if word in text] if kind.telling else ()
        return (edges, not bare, first, last, *telling)
