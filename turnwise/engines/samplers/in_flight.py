"""A request on its way through the batcher: what it asks for, and what has been written in its row so far."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from turnwise.engines.samplers.kv_cache import PromptBlock
from turnwise.engines.samplers.prompt_images import PromptImages
from turnwise.engines.samplers.request import SamplingParams
from turnwise.engines.samplers.sampling import Rules
from turnwise.errors import EngineError
from turnwise.ledger import MediaSpan
from turnwise.system import time_budget
from turnwise.types import Completion, FinishReason, VersionRun

DecodeText = Callable[[Sequence[int]], str]


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One turn to write: the whole sequence so far, how to draw, and the bits its noise comes from."""

    conversation: str
    token_ids: NDArray[np.int64]
    params: SamplingParams
    noise_bits: int
    media: tuple[MediaSpan, ...] = ()
    blocks: list[PromptBlock] = field(init=False)
    """By which its prompt is shared; written by `Batcher.submit`."""
    keep_cache: bool = True
    """Whether its cache is kept for another turn; `Batcher.release` says no."""
    asked: float = field(default_factory=lambda: time_budget.clock())
    begun: float | None = None
    """When it got its row; written by `Batcher`, as is:"""
    paused: float = 0.0
    """Seconds it stood still since then: while weights were replaced, or the sampler slept."""
    stopped: float | None = None
    """Since when it has been without the slot it had; a batcher that takes slots away writes it."""

    def departs_from(self, cached: NDArray[np.int64], media: Sequence[MediaSpan]) -> EngineError | None:
        """What is wrong unless it begins with the tokens and images that were kept of its conversation."""

        def named(spans: Sequence[MediaSpan]) -> list[tuple[int, str]]:
            return [(span.start, span.media.digest) for span in spans if span.start < len(cached)]

        if np.array_equal(cached, self.token_ids[: len(cached)]) and named(media) == named(self.media):
            return None
        return EngineError(
            f"conversation {self.conversation!r} changed earlier tokens: it must keep the {len(cached)} tokens so far"
        )

    def waited(self) -> float:
        """Seconds without a slot, of such a batcher."""
        now, since, begun = time_budget.clock(), self.stopped, self.begun
        if begun is None:
            return now - self.asked
        return begun - self.asked + self.paused + (0.0 if since is None else now - since)


Outcome = tuple[QueuedRequest, Completion | EngineError]


@dataclass(slots=True)
class SamplerStats:
    """What a sampler has done so far."""

    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    reused_tokens: int = 0
    peak_batch: int = 0
    preempted: int = 0
    """Turns that had to wait again because no memory was left to write in."""


class Writers:
    """Which version of the policy wrote which tokens of a turn."""

    def __init__(self, version: int) -> None:
        self._begun = [(version, 0)]
        """(version, how many tokens were there when it began to write), in order."""

    def hand_over(self, version: int, count: int) -> None:
        """Tokens behind the first `count` are another version's."""
        if self._begun[-1][1] == count:  # the last one wrote nothing
            self._begun.pop()
        self._begun.append((version, count))

    def runs(self, count: int) -> tuple[VersionRun, ...]:
        """The versions of `count` tokens, in order."""
        ends = [*(start for _, start in self._begun[1:]), count]
        return tuple(VersionRun(version, end - start) for (version, start), end in zip(self._begun, ends, strict=True))


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request that has a row; `fed` counts the tokens whose keys and values the row holds."""

    request: QueuedRequest
    limit: int
    fed: int
    shareable: bool
    writers: Writers
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    """The last tokens, long enough to hold any stop string."""
    prompt_images: PromptImages | None = None
    """Of a turn with images."""
    told: int = field(init=False)
    """Of how many tokens an earlier turn has told which experts were chosen."""

    def __post_init__(self) -> None:
        self.told = 0 if self.shareable else self.fed

    @property
    def prompt_length(self) -> int:
        """The number of tokens in the request's prompt."""
        return len(self.request.token_ids)

    def sequence(self) -> NDArray[np.int64]:
        """The prompt and what was written."""
        return np.concatenate((self.request.token_ids, np.array(self.ids, dtype=np.int64)))

    def written_by(self, version: int) -> None:
        """Tokens from here on are another version's."""
        if self.prompt_images is not None:
            self.prompt_images.forget()
        self.writers.hand_over(version, len(self.ids))

    def completion(self, reason: FinishReason, experts: Sequence[Tensor] = ()) -> Completion:
        """What was written, each token with its version; `experts` those chosen for the tokens from `told` on."""
        ids, logprobs = np.array(self.ids, dtype=np.int64), np.array(self.logprobs, dtype=np.float32)
        chosen = experts[0].numpy() if experts else None
        return Completion(ids, logprobs, reason, self.writers.runs(len(ids)), chosen)

    def stops(self, token: int, decode_text: DecodeText) -> bool:
        """Whether this token ends the turn: by itself, or with a stop string in the text so far.

        Only a tail is decoded anew each time: what came before it was searched already, and it always spans more
        characters than the longest stop string.
        """
        params = self.request.params
        if token in params.stop_ids:
            return True
        if not params.stop_strings:
            return False
        self.tail.append(token)
        text = decode_text(self.tail)
        longest = max(map(len, params.stop_strings))
        if len(text) > 4 * longest + 64:
            half = self.tail[len(self.tail) // 2 :]
            if len(decode_text(half)) > longest + 16:  # 16: characters cut in two at the edge
                self.tail = half
        return any(stop in text for stop in params.stop_strings)


@dataclass(slots=True, eq=False)
class WrittenRows:
    """The active rows of a batch as a decode step reads them."""

    tokens: NDArray[np.int64]
    """The last of each."""
    places: NDArray[np.int64]
    """Where they stand."""
    noise_bits: NDArray[np.uint64]
    rules: Rules
    shifts: NDArray[np.int64] | None
    """What images add to the positions; None where there are none, or they add nothing."""

    @classmethod
    def of(cls, active: Sequence[RunningRequest]) -> "WrittenRows":
        """The arrays of the requests that are writing now, one row for each."""
        shifts = [0 if running.prompt_images is None else running.prompt_images.shift for running in active]
        return cls(
            np.array([running.ids[-1] for running in active], dtype=np.int64),
            np.array([running.fed for running in active], dtype=np.int64),
            np.array([running.request.noise_bits for running in active], dtype=np.uint64),
            Rules.of([running.request.params for running in active]),
            np.array(shifts, dtype=np.int64) if any(shifts) else None,
        )
