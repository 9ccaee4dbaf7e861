"""What travels to and from actors: requests and results of samplers, many to a message, and a learner's batches.

A message costs about as much as a hundred turns in it, and an array by itself almost as much as a turn, so arrays of
turns travel end to end.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.cluster.shown import Placed
from turnwise.engines.learners.token_batch import TokenBatch
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
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
            (number, one.conversation, one.params, one.noise, tuple((s.media.digest, s.start) for s in one.media))
            for number, one in requests
        ]
        shown = [span.media for _, one in requests for span in one.media]
        lengths = np.array([len(one.token_ids) for _, one in requests], np.int64)
        ids = _joined([one.token_ids for _, one in requests], np.int32)
        return cls(heads, lengths, ids, {one.digest: one.content for one in shown if one.digest in new})

    def requests(self) -> list[tuple[int, Request, Placed]]:
        """As they were, with their images still to be put at their places."""
        ids = _split(self.token_ids.astype(np.int64), self.lengths)
        return [
            (number, Request(conversation, one, params, noise), placed)
            for (number, conversation, params, noise, placed), one in zip(self.heads, ids, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Outcome:
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
    failed: list[Outcome]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> "PackedOutcomes":
        """To be sent."""
        good = [(one.number, one.completion) for one in outcomes if one.completion is not None]
        return cls(
            [(n, c.finish_reason.value, tuple((run.version, run.tokens) for run in c.versions)) for n, c in good],
            np.array([len(c.token_ids) for _, c in good], np.int64),
            _joined([c.token_ids for _, c in good], np.int32),
            _joined([c.logprobs for _, c in good], np.float32),
            [one for one in outcomes if one.completion is None],
        )

    def outcomes(self) -> list[Outcome]:
        """As they were; the arrays are the receiver's own."""
        ids, logprobs = _split(self.token_ids.astype(np.int64), self.lengths), _split(self.logprobs, self.lengths)
        found = list(self.failed)
        for (number, finish, versions), tokens, chances in zip(self.heads, ids, logprobs, strict=True):
            runs = tuple(VersionRun(version, count) for version, count in versions)
            found.append(Outcome(number, Completion(tokens, chances.copy(), FinishReason(finish), runs)))
        return found


def _joined(arrays: Sequence[NDArray[Any]], kind: type) -> NDArray[Any]:
    return np.concatenate(arrays).astype(kind) if arrays else np.zeros(0, kind)


def _split(array: NDArray[Any], lengths: NDArray[np.int64]) -> list[NDArray[Any]]:
    ends = np.cumsum(lengths).tolist()
    return [array[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]


def own_arrays(batch: TokenBatch) -> TokenBatch:
    """A batch of the object store with arrays of its own: those of the store must not be written to."""
    held = {one.name: getattr(batch, one.name) for one in fields(batch)}
    own: dict[str, Any] = {name: np.array(one) for name, one in held.items() if isinstance(one, np.ndarray)}
    return replace(batch, **own)
