"""What goes into a sampler: the sequence to continue, how to draw, and the key of its noise."""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import EngineError
from turnwise.ledger import MediaSpan


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
    branch: str = ""
    """Of the episode's conversations, or of an SDK agent's call; empty for the main conversation of other loops."""

    def bits(self) -> int:
        """A 64-bit key; the noise at a position is a hash of it and the position."""
        text = f"{self.seed}/{self.step}/{self.sibling}/{self.sample}"
        if self.branch:
            text += f"\n{self.branch}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One turn to write: the whole sequence so far and how to draw.

    `conversation` names a sequence that only grows, so that its cache can be kept between turns; it must be released
    when it will not be continued.
    """

    conversation: str
    token_ids: NDArray[np.int64]
    params: SamplingParams
    noise: NoiseKey
    media: tuple[MediaSpan, ...] = ()
    """The images of the sequence in order, each at its place among `token_ids`."""


def refuse_media(request: Request, who: str) -> None:
    """For samplers that read text only: a picture left out silently would be answered as if it were not there."""
    if request.media:
        raise EngineError(f"the {who} reads text only, and {request.conversation!r} has {len(request.media)} image(s)")
