"""A conversation whose assistant is a script: it is told the sample, the messages and the tools beside the tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnwise.engines.samplers.scripted import ScriptedSampler, Situation
from turnwise.rollout.chat_backends import TokenBackend
from turnwise.types import Message, Sample, StopReason


@dataclass(slots=True, kw_only=True)
class ScriptedBackend(TokenBackend):
    """Every token as any sampler's; before each turn the script's sampler has heard what was said."""

    script: ScriptedSampler
    sample_of: Callable[[str], Sample | None]
    """By id."""

    def open(self, prompt: Sequence[Message]) -> None:
        TokenBackend.open(self, prompt)
        self._tell(prompt)

    def append_replies(
        self, messages: Sequence[Message], replies: Sequence[Message], turn: int, budget: int | None
    ) -> StopReason | None:
        full = TokenBackend.append_replies(self, messages, replies, turn, budget)
        self._tell([*messages, *replies])
        return full

    def _tell(self, messages: Sequence[Message]) -> None:
        situation = Situation(self.sample_of(self.noise.sample), tuple(messages), tuple(self.tools))
        self.script.situations[self.conversation] = situation
