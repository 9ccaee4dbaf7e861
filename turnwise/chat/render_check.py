"""The self-check of a finished conversation: its recorded tokens and images against one full render of its messages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from turnwise.chat.control_tokens import shared
from turnwise.chat.images.blocks import Prompt
from turnwise.chat.render_alignment import TokenSpan, Walk, token_spans
from turnwise.chat.template.chat_template import ChatTemplate
from turnwise.chat.tokenizer import Tokenizer
from turnwise.errors import TemplateError
from turnwise.types import JsonSchema, Ledger, Message, Origin, RenderCheck, Role


class EncodeAll(Protocol):
    """One render of messages in tokens, with words after it, or (without `reply`) up to the last message's calls."""

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[JsonSchema], *, words: str = "", reply: bool = True
    ) -> Prompt: ...


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What one conversation is compared by."""

    tokenizer: Tokenizer
    template: ChatTemplate
    stop_ids: frozenset[int]
    encode_all: EncodeAll
    verbatim: bool
    """Whether the sampled tokens are kept whatever the template would make of them."""
    bare: bool = False
    """Whether they are kept where only empty thoughts of the template's come or go."""

    def check(self, ledger: Ledger, messages: Sequence[Message], tools: Sequence[JsonSchema]) -> RenderCheck:
        """The recorded tokens against one full render of the final messages.

        Of a last assistant message the words are compared, not how the template would show them: no model saw that.
        A template that refuses the conversation as a whole leaves `position` empty: there is nothing to compare.
        """
        answered = messages[-1].role is Role.ASSISTANT
        words = messages[-1].text + self.template.closing if answered else ""
        try:
            expected, placed = self.encode_all(messages[:-1] if answered else messages, tools, words=words)
        except TemplateError as error:
            problem = None if self.verbatim else f"the whole conversation cannot be rendered: {error}"
            return RenderCheck(exact=False, same_text=False, problem=problem)
        recorded = ledger.token_ids.tolist()
        common = shared(expected, recorded)
        if [span.media.digest for span in placed] != [span.media.digest for span in ledger.media]:
            return RenderCheck(False, False, common, "the images recorded are not those of the messages")
        if common == len(recorded) and self._closing.endswith(self.tokenizer.decode(expected[common:])):
            same = [span.start for span in placed] == [span.start for span in ledger.media]
            problem = None if same else "the images recorded stand elsewhere among the same tokens"
            return RenderCheck(same, same, None if same else common, problem)  # the usual case: decoding is slow
        rendered, written = self.tokenizer.decode(expected), self.tokenizer.decode(recorded)
        unended = self.tokenizer.decode(recorded[:-1]) if set(recorded[-1:]) & self.stop_ids else written
        # What closes the last message may be missing: it was cut short, or the template closes it only later.
        closed = rendered.startswith(written) and self._closing.endswith(rendered[len(written) :])
        same_text = closed or rendered == unended
        exact = same_text and common >= min(len(expected), len(recorded))
        declared = same_text or self.verbatim
        problem = None if declared else self._problem(ledger, rendered, messages, tools, bare=False)
        if problem is not None and self.bare:
            problem = self._problem(ledger, self.template.bare(rendered), messages, tools, bare=True)
        return RenderCheck(exact, same_text, None if exact else common, problem)

    def _problem(
        self,
        ledger: Ledger,
        rendered: str,
        messages: Sequence[Message],
        tools: Sequence[JsonSchema],
        *,
        bare: bool,
    ) -> str | None:
        """The first difference that is not of the policy's making: its own words, their edges and its end tokens.
        `bare`: nor empty thoughts, which are left out of both texts."""
        walk, decode = Walk(rendered), self.tokenizer.decode
        answered = [
            i for i, message in enumerate(messages) if message.role is Role.ASSISTANT and message.answer is not None
        ]
        for span in token_spans(ledger):
            if span.policy:
                ended = span.ids[-1] in self.stop_ids
                words = span.ids[:-1] if ended else span.ids
                until = answered[span.turn] + 1
                spelled = until == len(messages)  # the words of a last message are what `check` compares
                difference = self._follow(walk, words, messages[:until], tools, spelled=spelled, bare=bare)
                walk.ended(decode(span.ids[-1:]) if ended else "")
            else:
                text = decode(span.ids)
                difference = walk.pass_given(self.template.bare(text) if bare else text)
            if difference is not None and not span.start and self._has_a_clock(span, messages, answered, ledger, tools):
                return None
            if difference is not None:
                return f"at token {span.start} (turn {span.turn}): {difference}"
        return None

    def _follow(
        self,
        walk: Walk,
        words: list[int],
        messages: Sequence[Message],
        tools: Sequence[JsonSchema],
        *,
        spelled: bool,
        bare: bool,
    ) -> str | None:
        """Go past the last of these messages, which the policy wrote; `spelled` as it did, whatever it calls."""
        decode, encode = self.tokenizer.decode, self.tokenizer.encode
        if spelled or not self.template.is_structured(messages[-1]):
            # As the tokenizer reads them: it may normalise what a sampler spells otherwise.
            written = decode(encode(decode(words), after="").ids)
            return walk.pass_written(self.template.bare(written) if bare else written, self.template.thought.strip())
        expected = decode(self.encode_all(messages, tools, reply=False).ids)
        return walk.jump(self.template.bare(expected) if bare else expected)

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
        return bool(turns) and self.encode_all(messages[: answered[turns[0]]], tools).ids != first.ids

    @property
    def _closing(self) -> str:
        """What ends an assistant's message, as its tokens read."""
        return self.tokenizer.decode(self.tokenizer.encode(self.template.closing).ids)
