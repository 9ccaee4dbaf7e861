"""A pass whose tokens several ranks share (context parallelism): a slice of them each, and in attention some heads."""

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from turnwise.engines.learners.device_batch import DeviceBatch
from turnwise.engines.learners.forward_pass import ForwardPass
from turnwise.engines.model.policy_model import Attend, ImageFeatures, Mixing, ModelInputs, PolicyModel
from turnwise.engines.model.routing import Routing
from turnwise.errors import EngineError


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The ranks that share the tokens of every pass, of which this process is one."""

    group: dist.ProcessGroup
    host: dist.ProcessGroup
    """The same ranks, for numbers on the CPU."""

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return self.group.rank()

    def most(self, number: int) -> int:
        """The largest of the numbers that the ranks say."""
        box = torch.tensor([number])
        dist.all_reduce(box, dist.ReduceOp.MAX, group=self.host)
        return int(box)


@dataclass(frozen=True)
class SlicedPass(ForwardPass):
    """`ForwardPass` of a rank that shares its passes with others, all of which run them with the same batches.

    Whatever a layer does but attend, it does to each token alone (recurrent layers are refused), so a slice of them is
    enough. Before attention the ranks exchange tokens for heads, and heads for tokens behind it (Ulysses).
    Log-probs, entropies and values are gathered: a rank has those of all tokens, and the gradient of its own.
    """

    context: ContextGroup | None = None
    """None where a rank has its passes for itself."""

    def hidden(
        self, model: PolicyModel, batch: DeviceBatch, recompute: int = 0, watched: list[Routing] | None = None
    ) -> Tensor:
        """Of this rank's tokens; one of nobody's where it has none, so that it has a gradient. No router is watched."""
        if self.context is None:
            return super().hidden(model, batch, recompute, watched)
        part = _Slice.of(batch, self.context)
        inputs = part.of_inputs(self._inputs(model, batch.tokens, batch.lengths, batch.image_sequences))
        lengths = [*batch.lengths, part.padding] if part.padding else batch.lengths
        attend = _by_heads(self._attend(model, lengths), self.context)
        rows = batch.index[part.own] - 1 - part.start if part.count else batch.index.new_zeros(1)
        hidden: Tensor = model(inputs, attend, rows=rows, recompute=recompute)
        return hidden

    def scores(self, model: PolicyModel, batch: DeviceBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Of all tokens, from the states of this rank's."""
        if self.context is None:
            return super().scores(model, batch, hidden)
        part = _Slice.of(batch, self.context)
        targets = batch.targets[part.own] if part.count else batch.tokens[:1]
        own = model.scores(hidden, targets, temperature=self.temperature, chunk=self.chunk_tokens)
        logprobs, entropy = (self.of_all(numbers, batch) for numbers in own)
        return logprobs, entropy

    def of_all(self, own: Tensor, batch: DeviceBatch) -> Tensor:
        """A number [N] of every policy token, from those of this rank's."""
        if self.context is None:
            return own
        gathered = cast(Any, _Gathered).apply(own, _Slice.of(batch, self.context), self.context.group)
        return cast(Tensor, gathered)


@dataclass(frozen=True, slots=True)
class _Slice:
    """Tokens `start` to `end` of a pass, which zeros make longer so that every rank has as many."""

    start: int
    end: int
    padding: int
    counts: tuple[int, ...]
    """Policy tokens by rank; their order is the batch's."""
    rank: int

    @classmethod
    def of(cls, batch: DeviceBatch, context: ContextGroup) -> "_Slice":
        """A policy token is whose the token before it is, from which it is predicted."""
        total, size, rank = len(batch.tokens), context.size, context.rank
        width = -(-total // size)
        ends = np.searchsorted(batch.places - 1, width * np.arange(1, size + 1))
        counts = np.diff(ends, prepend=0).tolist()
        return cls(rank * width, (rank + 1) * width, size * width - total, tuple(counts), rank)

    @property
    def count(self) -> int:
        """How many policy tokens are this rank's."""
        return self.counts[self.rank]

    @property
    def own(self) -> slice:
        """Which of all policy tokens they are."""
        first = sum(self.counts[: self.rank])
        return slice(first, first + self.count)

    def of_inputs(self, inputs: ModelInputs) -> ModelInputs:
        """What the model reads of these tokens."""
        tokens, positions = (
            functional.pad(x, (0, self.padding))[..., self.start : self.end] for x in (inputs.tokens, inputs.positions)
        )
        images = inputs.images
        if images is not None:
            here = (images.places >= self.start) & (images.places < self.end)
            deep = tuple(rows[here] for rows in images.deep)
            images = ImageFeatures(images.places[here] - self.start, images.rows[here], deep)
        return ModelInputs(tokens, positions, images)


def _by_heads(attend: Attend, context: ContextGroup) -> Attend:
    """Attention of a rank that is given its slice of the tokens, where `attend` takes all of them."""
    size = context.size

    def by_heads(layer: int, q: Tensor, k: Tensor, v: Tensor, mixing: Mixing) -> Tensor:
        if q.shape[1] % size:
            raise EngineError(
                f"fsdp.context_parallel={size} does not divide the {q.shape[1]} query heads of attention layer {layer}"
            )
        if q.is_cuda and torch.is_autocast_enabled("cuda"):  # as attention itself would
            q, k, v = (x.to(torch.get_autocast_dtype("cuda")) for x in (q, k, v))
        copies = size // math.gcd(size, k.shape[1])
        if copies > 1:  # fewer heads than ranks: some have the same
            k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
        parts = [x.reshape(len(q), size, -1) for x in (q, k, v)]
        widths = [part.shape[2] for part in parts]
        # [ranks, t, W] to each its heads of our tokens, and from each our heads of its tokens
        mine = _exchange(torch.cat(parts, dim=2).transpose(0, 1), context).flatten(0, 1)
        heads = zip(torch.split(mine, widths, dim=1), (q, k, v), strict=True)
        all_q, all_k, all_v = (part.reshape(len(mine), -1, x.shape[2]) for part, x in heads)
        if mixing.sinks is not None:
            mixing = replace(mixing, sinks=mixing.sinks.view(size, -1)[context.rank])
        mixed = attend(layer, all_q, all_k, all_v, mixing)
        return _exchange(mixed.view(size, len(q), -1), context).transpose(0, 1).flatten(1)

    return by_heads


def _exchange(x: Tensor, context: ContextGroup) -> Tensor:
    return cast(Tensor, cast(Any, _Exchange).apply(x, context.group))


class _Exchange(torch.autograd.Function):
    """Part i of x goes to rank i, and what rank i has for this one comes in its place; so do gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(gradients[0], ctx.group), None


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    given = x.contiguous()
    received = torch.empty_like(given)
    dist.all_to_all_single(received, given, group=group)
    return received


class _Gathered(torch.autograd.Function):
    """The numbers of all ranks, end to end. All compute the same loss of them, so each takes its part of the gradient
    as it is."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, part: _Slice, group: dist.ProcessGroup) -> Tensor:
        ctx.part, ctx.shape = part, own.shape
        widest = max(part.counts)
        given = functional.pad(own[: part.count], (0, widest - part.count))
        received = given.new_empty(len(part.counts) * widest)
        dist.all_gather_into_tensor(received, given, group=group)
        return torch.cat([row[:count] for row, count in zip(torch.split(received, widest), part.counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given = gradients[0]
        return given[ctx.part.own] if ctx.part.count else given.new_zeros(ctx.shape), None, None
