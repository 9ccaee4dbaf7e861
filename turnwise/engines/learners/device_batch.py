"""A batch on the learner's device: checked where it came from, then moved there once.

Legend: T tokens, N policy tokens among them, S sequences, K trajectories they are segments of.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from turnwise.engines.learners.learner import Floats, Ints, TokenBatch
from turnwise.engines.model.attention import sent
from turnwise.errors import EngineError
from turnwise.ledger import MediaSpan, check_places

PER_TOKEN = ("old_logprobs", "ref_logprobs", "values", "advantages", "returns", "weights")
"""Arrays [N] that losses read."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageSequence:
    """A sequence as it is before it is sent: its tokens, and its images at their places in it."""

    tokens: Ints
    media: tuple[MediaSpan, ...]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBatch:
    """What losses and forward passes read of a `TokenBatch`, as tensors; its fields have the same meaning."""

    tokens: Tensor
    """[T]"""
    lengths: tuple[int, ...]
    """[S]"""
    written: tuple[int, ...]
    """[S] policy tokens of each sequence."""
    index: Tensor
    """[N]"""
    places: Ints
    """[N] the same on the host."""
    trajectory: Tensor
    """[N]"""
    trajectory_tokens: Tensor
    """[K]"""
    minibatch_tokens: int
    minibatch_trajectories: int
    whole_trajectories: bool
    """Whether all policy tokens of its trajectories are here."""
    old_logprobs: Tensor | None = None
    """[N], as are those below."""
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    weights: Tensor | None = None
    image_sequences: tuple[ImageSequence, ...] = ()
    """[S] the sequences where any has images; none for text alone."""
    experts: Tensor | None = None
    """[T, routers, k]"""

    @property
    def targets(self) -> Tensor:
        """The policy's tokens [N], which the loss is computed for."""
        return self.tokens[self.index]

    def trajectory_sums(self, values: Tensor) -> Tensor:
        """[K] the sum over each trajectory's policy tokens here of a value per policy token, with gradient."""
        return values.new_zeros(len(self.trajectory_tokens)).index_add(0, self.trajectory, values)


def on_device(batch: TokenBatch, device: torch.device) -> DeviceBatch:
    """The batch as tensors; EngineError for one that makes no sense."""
    check(batch)
    ends = np.searchsorted(batch.index, np.cumsum(batch.lengths))

    def floats(array: Floats | None) -> Tensor | None:
        return None if array is None else sent(torch.tensor(array, dtype=torch.float32), device)

    return DeviceBatch(
        tokens=sent(torch.tensor(batch.tokens), device),
        lengths=tuple(batch.lengths.tolist()),
        written=tuple(np.diff(ends, prepend=0).tolist()),
        index=sent(torch.tensor(batch.index), device),
        places=batch.index,
        trajectory=sent(torch.tensor(batch.trajectory), device),
        trajectory_tokens=sent(torch.tensor(batch.trajectory_tokens), device),
        minibatch_tokens=batch.minibatch_tokens,
        minibatch_trajectories=batch.minibatch_trajectories,
        whole_trajectories=np.array_equal(
            np.bincount(batch.trajectory, minlength=len(batch.trajectory_tokens)), batch.trajectory_tokens
        ),
        **{name: floats(getattr(batch, name)) for name in PER_TOKEN},
        image_sequences=_image_sequences(batch) if batch.media else (),
        experts=None if batch.experts is None else sent(torch.from_numpy(batch.experts), device),
    )


def _image_sequences(batch: TokenBatch) -> tuple[ImageSequence, ...]:
    ends = np.cumsum(batch.lengths).tolist()
    starts = [0, *ends[:-1]]
    spans = zip(starts, ends, strict=True)
    return tuple(ImageSequence(batch.tokens[start:end], within(batch.media, start, end)) for start, end in spans)


def check(batch: TokenBatch) -> None:
    """EngineError for a batch that makes no sense: a token that opens a sequence has nothing to predict it from."""
    tokens, lengths, index = batch.tokens, batch.lengths, batch.index
    if tokens.ndim != 1 or index.ndim != 1 or lengths.sum() != len(tokens) or lengths.min(initial=1) < 1:
        raise EngineError(f"{len(tokens)} tokens cannot be sequences of lengths {lengths[:20].tolist()}")
    if len(index) == 0:
        raise EngineError("there is no token to score")
    if index.min() < 0 or index.max() >= len(tokens):
        raise EngineError(f"places {index.min()} to {index.max()} are outside {len(tokens)} tokens")
    if (index[1:] <= index[:-1]).any():
        raise EngineError("the places of policy tokens must rise")
    if np.isin(index, np.cumsum(lengths) - lengths).any():
        raise EngineError("a sequence starts with a policy token: there is nothing to predict it from")
    for name in ("trajectory", *PER_TOKEN):
        array = getattr(batch, name)
        if array is not None and array.shape != index.shape:
            raise EngineError(f"{array.shape} {name} for {len(index)} policy tokens")
    if batch.trajectory.min() < 0 or batch.trajectory.max() >= len(batch.trajectory_tokens):
        raise EngineError(f"a policy token belongs to none of the {len(batch.trajectory_tokens)} trajectories")
    if batch.experts is not None and len(batch.experts) != len(tokens):
        raise EngineError(f"experts are given for {len(batch.experts)} of {len(tokens)} tokens")
    if batch.media:
        _check_media(batch)


def _check_media(batch: TokenBatch) -> None:
    try:
        check_places(batch.media, batch.tokens)
    except ValueError as error:
        raise EngineError(str(error)) from error
    ends = np.cumsum(batch.lengths)
    for span in batch.media:
        if np.searchsorted(ends, span.start, "right") != np.searchsorted(ends, span.end - 1, "right"):
            raise EngineError(f"image {span.media.digest} begins in one sequence and ends in another")
        if np.searchsorted(batch.index, span.start) != np.searchsorted(batch.index, span.end):
            raise EngineError(f"the tokens of image {span.media.digest} are not the policy's, and cannot be scored")


def within(spans: Iterable[MediaSpan], start: int, end: int) -> tuple[MediaSpan, ...]:
    """Those of which any token lies in [start, end), counted from `start`; one that is cut has a part outside."""
    return tuple(span.shifted(-start) for span in spans if span.start < end and span.end > start)
