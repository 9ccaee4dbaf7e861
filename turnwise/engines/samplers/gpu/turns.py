"""A turn on its way through the device batcher, and what has been written so far in each slot, as arrays."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from turnwise.engines.kernels.paged_attention import PAGE
from turnwise.engines.kernels.sampling import STOP_IDS
from turnwise.engines.samplers.gpu.paged_cache import PagedCache
from turnwise.engines.samplers.gpu.pass_shapes import PromptChunk
from turnwise.engines.samplers.in_flight import DecodeText, QueuedRequest, Writers
from turnwise.engines.samplers.kv_cache import block_hashes
from turnwise.engines.samplers.prompt_images import PromptImages
from turnwise.ledger import MediaSpan
from turnwise.types import Completion, FinishReason

NO_IDS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
NO_LOGPROBS: NDArray[np.float32] = np.zeros(0, dtype=np.float32)


@dataclass(slots=True, eq=False)
class RunningTurn:
    """A request that waits for a slot or has one.

    One that lost its slot (new weights, sleep, no pages left) waits again with what it wrote behind its prompt; noise
    is by position, so it goes on as it would have.
    """

    request: QueuedRequest
    limit: int
    """Most tokens it may write."""
    writers: Writers
    ids: NDArray[np.int64] = field(default_factory=lambda: NO_IDS)
    """Written before it got the slot it has."""
    logprobs: NDArray[np.float32] = field(default_factory=lambda: NO_LOGPROBS)
    slot: int = -1
    order: int = 0
    """When it got its slot, by a counter."""
    tokens: NDArray[np.int64] = field(default_factory=lambda: NO_IDS)
    """What is fed in this slot: the prompt and `ids`."""
    fed: int = 0
    """How many of `tokens` have been handed to the device."""
    tail: list[int] = field(default_factory=list)
    """The last tokens, long enough to hold any stop string."""
    known_digests: list[bytes] | None = None
    prompt_images: PromptImages | None = None
    """Of a turn with images."""
    carries_states: bool = False
    """Whether the model has recurrent layers, whose states are kept where what prompts share ends."""

    @property
    def name(self) -> str:
        """The name of the conversation that the turn belongs to."""
        return self.request.conversation

    @property
    def digests(self) -> list[bytes]:
        """Of the prompt's whole pages; made when first asked for, since a kept conversation needs none."""
        if self.known_digests is None:
            self.known_digests = block_hashes(self.request.token_ids, self.request.media)
        return self.known_digests

    def unfed(self, cache: PagedCache) -> tuple[tuple[MediaSpan, ...], int]:
        """Its images, and how many of its first tokens lie in pages."""
        kept = cache.get(self.name)
        return tuple(self.request.media), cache.known(self.digests) * PAGE if kept is None else kept.fed

    @property
    def filtered(self) -> bool:
        """Whether it is drawn by top-k or top-p."""
        return self.request.params.top_k > 0 or self.request.params.top_p < 1.0

    @property
    def ended_by_host(self) -> bool:
        """Whether the device alone cannot tell its end: a stop string, or more stop ids than a slot has."""
        params = self.request.params
        return bool(params.stop_strings) or len(params.stop_ids) > STOP_IDS

    def sequence(self) -> NDArray[np.int64]:
        """The prompt and what was written; the turn has no slot now."""
        return np.concatenate((self.request.token_ids, self.ids)) if len(self.ids) else self.request.token_ids

    @property
    def shared_end(self) -> int:
        """How many tokens of the prompt its digests cover; 0 where nobody asked for them."""
        return len(self.known_digests or ()) * PAGE

    def next_chunk(self, most: int) -> PromptChunk:
        """The next tokens of the prompt to be fed, at most so many."""
        if self.carries_states and self.fed < self.shared_end:
            most = min(most, self.shared_end - self.fed)
        tokens = self.tokens[self.fed : self.fed + most]
        last = self.fed + len(tokens) == len(self.tokens)
        return PromptChunk(self.slot, self.fed, tokens, last=last, prompt_images=self.prompt_images)

    def written_by(self, version: int) -> None:
        """Tokens from here on are another version's; the turn has no slot now."""
        if self.prompt_images is not None:
            self.prompt_images.forget()
        self.writers.hand_over(version, len(self.ids))

    def completion(self, reason: FinishReason) -> Completion:
        """What was written, each token with its version."""
        return Completion(self.ids, self.logprobs, reason, self.writers.runs(len(self.ids)))

    def cut(self, fresh: list[int], decode_text: DecodeText) -> int | None:
        """How many of the new tokens belong to the turn when one of them ends it; None when it goes on.

        Only a tail is decoded again with each run: what came before it was searched already, and it always spans more
        characters than the longest stop string.
        """
        params = self.request.params
        by_id = next((at for at, token in enumerate(fresh, start=1) if token in params.stop_ids), None)
        if not params.stop_strings:
            return by_id
        searched = fresh[:by_id]
        if any(stop in decode_text([*self.tail, *searched]) for stop in params.stop_strings):
            for at in range(1, len(searched) + 1):
                text = decode_text([*self.tail, *searched[:at]])
                if any(stop in text for stop in params.stop_strings):
                    return at
        self.tail.extend(searched)
        longest = max(map(len, params.stop_strings))
        while len(self.tail) > 1:
            half = self.tail[len(self.tail) // 2 :]
            if len(decode_text(half)) <= longest + 16:  # 16: characters cut in two at the edge
                break
            self.tail = half
        return by_id


class WrittenTokens:
    """Tokens and log-probs by slot, written for all slots of a run at once; the room grows with the longest turn."""

    def __init__(self, slots: int) -> None:
        self.count = np.zeros(slots, dtype=np.int64)
        self._tokens = np.zeros((slots, 64), dtype=np.int32)
        self._logprobs = np.zeros((slots, 64), dtype=np.float32)

    def append(
        self,
        slots: NDArray[np.int64],
        counts: NDArray[np.int64],
        tokens: NDArray[np.int32],
        logprobs: NDArray[np.float32],
    ) -> None:
        """The first `counts[i]` of column i of tokens [steps, n] to slot `slots[i]`."""
        most = int((self.count[slots] + counts).max(initial=0))
        while most > self._tokens.shape[1]:
            self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)), axis=1)
            self._logprobs = np.concatenate((self._logprobs, np.zeros_like(self._logprobs)), axis=1)
        if len(counts) and counts.min() == len(tokens):  # everybody goes on
            where = slots, self.count[slots] + np.arange(len(tokens))[:, None]
            self._tokens[where], self._logprobs[where] = tokens, logprobs
        else:
            step, column = np.nonzero(np.arange(len(tokens))[:, None] < counts)
            where = slots[column], self.count[slots[column]] + step
            self._tokens[where], self._logprobs[where] = tokens[step, column], logprobs[step, column]
        self.count[slots] += counts

    def take(self, slot: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """What was written in a slot, which is empty afterwards."""
        count = int(self.count[slot])
        self.count[slot] = 0
        return self._tokens[slot, :count].astype(np.int64), self._logprobs[slot, :count].copy()
