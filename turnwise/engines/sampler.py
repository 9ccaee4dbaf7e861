"""The Sampler protocol: tokens in, tokens out, with logprobs, a finish reason and the policy's version."""

import hashlib
from dataclasses import dataclass
from typing import Protocol

from turnwise.types import Completion


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw one completion. Temperature 0 is greedy; top_k 0 and top_p 1 switch those filters off."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """What a trajectory's randomness depends on, and nothing else: not on batching, threads or arrival order."""

    seed: int
    step: int
    sample: str
    sibling: int

    def bits(self) -> int:
        """A 64-bit key; the noise at a position is a hash of it and the position."""
        text = f"{self.seed}/{self.step}/{self.sibling}/{self.sample}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Sampler(Protocol):
    """Writes completions. One instance serves many conversations at once."""

    context_length: int
    """The most tokens a sequence may have, prompt included."""

    async def generate(
        self, conversation: str, token_ids: list[int], params: SamplingParams, noise: NoiseKey
    ) -> Completion:
        """Continue `token_ids`, the whole sequence so far.

        `conversation` names a sequence that only grows, so that its KV cache can be kept between turns; it must be
        released when it will not be continued. A full context gives FinishReason.LENGTH with fewer tokens.
        """
        ...

    async def release(self, conversation: str) -> None:
        """Forget what was kept for a conversation; unknown names are fine."""
        ...

    async def close(self) -> None:
        """Free everything; pending requests fail."""
        ...
