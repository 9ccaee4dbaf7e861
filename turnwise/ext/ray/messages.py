"""What travels to and from actors: requests and results of samplers, many to a message, and a learner's batches.

A message costs about as much as a hundred turns in it, and an array by itself almost as much as a turn, so arrays of
turns travel end to end.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.engines.learners.learner import TokenBatch
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.ext.ray.sent_images import Placed
from turnwise.types import Completion, FinishReason, VersionRun


@dataclass(frozen=True, slots=True, eq=False)
class PackedRequests:
    """Requests by number; their images are named, and come along where they are new."""

    heads: list[tuple[int, str, SamplingParams, NoiseKey, Placed]]
    lengths: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    images: dict[str, bytes]
    """Encoded, by digest: what a model's processor makes of one takes a hundred times its bytes, and is made there."""

    @classmethod
    def of(cls, requests: Sequence[tuple[int, Request]], new: Set[str] = frozenset()) -> "PackedRequests":
        """To be sent, with the images of these digests."""
        heads = [
            (
                number,
                request.conversation,
                request.params,
                request.noise,
                tuple((s.media.digest, s.start) for s in request.media),
            )
            for number, request in requests
        ]
        images = [span.media for _, request in requests for span in request.media]
        lengths = np.array([len(request.token_ids) for _, request in requests], np.int64)
        ids = _joined([request.token_ids for _, request in requests], np.int32)
        return cls(
            heads, lengths, ids, {request.digest: request.content for request in images if request.digest in new}
        )

    def requests(self) -> list[tuple[int, Request, Placed]]:
        """As they were, with their images still to be put at their places."""
        ids = _split(self.token_ids.astype(np.int64), self.lengths)
        return [
            (number, Request(conversation, token_ids, params, noise), placed)
            for (number, conversation, params, noise, placed), token_ids in zip(self.heads, ids, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """How a request ended: a completion, or what went wrong."""

    number: int
    completion: Completion | None = None
    problem: str = ""
    lost: bool = False
    """Asking again may help."""
    bug: bool = False
    ends_episode: bool = False
    """Nothing is wrong but with this request."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedOutcomes:
    """Outcomes; those without a completion lie beside the others."""

    heads: list[tuple[int, str, tuple[tuple[int, int], ...]]]
    """Number, finish reason, and the versions as (version, tokens)."""
    lengths: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    failed: list[TurnOutcome]

    @classmethod
    def of(cls, outcomes: Sequence[TurnOutcome]) -> "PackedOutcomes":
        """Packs outcomes into a few arrays, to be sent."""
        good = [(outcome.number, outcome.completion) for outcome in outcomes if outcome.completion is not None]
        return cls(
            [(n, c.finish_reason.value, tuple((run.version, run.tokens) for run in c.versions)) for n, c in good],
            np.array([len(c.token_ids) for _, c in good], np.int64),
            _joined([c.token_ids for _, c in good], np.int32),
            _joined([c.logprobs for _, c in good], np.float32),
            [outcome for outcome in outcomes if outcome.completion is None],
        )

    def outcomes(self) -> list[TurnOutcome]:
        """As they were; the arrays are the receiver's own."""
        ids, logprobs = _split(self.token_ids.astype(np.int64), self.lengths), _split(self.logprobs, self.lengths)
        unpacked = list(self.failed)
        for (number, finish, versions), tokens, chances in zip(self.heads, ids, logprobs, strict=True):
            runs = tuple(VersionRun(version, count) for version, count in versions)
            unpacked.append(TurnOutcome(number, Completion(tokens, chances.copy(), FinishReason(finish), runs)))
        return unpacked


def _joined(arrays: Sequence[NDArray[Any]], kind: type) -> NDArray[Any]:
    return np.concatenate(arrays).astype(kind) if arrays else np.zeros(0, kind)


def _split(array: NDArray[Any], lengths: NDArray[np.int64]) -> list[NDArray[Any]]:
    ends = np.cumsum(lengths).tolist()
    return [array[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]


def own_arrays(batch: TokenBatch) -> TokenBatch:
    """A batch of the object store with arrays of its own: those of the store must not be written to."""
    held = {entry.name: getattr(batch, entry.name) for entry in fields(batch)}
    own: dict[str, Any] = {name: np.array(entry) for name, entry in held.items() if isinstance(entry, np.ndarray)}
    return replace(batch, **own)
