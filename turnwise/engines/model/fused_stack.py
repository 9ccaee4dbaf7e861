"""All layers of a fused decoder as one step of autograd: forward and backward walk them by hand.

A GPU is faster than a CPU can tell it what to do, and torch's bookkeeping for each small step takes the CPU longer than
the step. Backward keeps what it needs of the products' inputs, lets go of it layer by layer, and writes where it can
over what nobody reads any more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from turnwise.engines.kernels.linear import invariant_linear, linear
from turnwise.engines.kernels.row_gradients import (
    added_up,
    head_parts,
    norm_gradient,
    norm_parts,
    rotate_gradient,
    swiglu_gradient,
)
from turnwise.engines.kernels.rows import Rotation, add_rms_norm, rotate, swiglu
from turnwise.engines.model.packed_attention import Attended, attended
from turnwise.engines.model.policy_model import Attend


class LayerWeights(NamedTuple):
    """The parameters of a layer, or whether each wants a gradient, or that gradient."""

    attention_norm: Any
    qkv: Any
    qkv_bias: Any
    q_norm: Any
    k_norm: Any
    output: Any
    output_bias: Any
    mlp_norm: Any
    gate_up: Any
    down: Any


@dataclass(frozen=True, slots=True)
class StackPass:
    """What the layers of one pass share; `rotation` has no norms of heads."""

    rotation: Rotation
    attend: Attend
    invariant: bool
    rows: Tensor | None
    """Which rows go on past the last layer's attention; None is all."""
    recompute: int
    """Leading layers of which only what enters them is kept."""

    @property
    def product(self) -> Callable[..., Tensor]:
        """The function that multiplies rows by a weight: invariant to the batch, or the fast one."""
        return invariant_linear if self.invariant else linear


def run_stack(x: Tensor, layers: Sequence[LayerWeights], norm: Tensor, stack_pass: StackPass) -> Tensor:
    """The states behind the last norm, from the stream x [T, H] before the first layer; differentiable once."""
    flat = [weight for weights in layers for weight in weights]
    return cast(Tensor, cast(Any, _Stack).apply(stack_pass, x, norm, *flat))


class _Before(NamedTuple):
    """Kept of a layer up to its attention."""

    s: Tensor
    y: Tensor
    fused: Tensor
    attended: Attended


class _Behind(NamedTuple):
    """Kept of a layer behind its attention."""

    mixed: Tensor
    s: Tensor
    y: Tensor
    wide: Tensor
    inner: Tensor


_Kept = tuple[_Before, _Behind] | Tensor
"""Of a layer that is computed again: the stream that enters it."""


def _forward(
    stack_pass: StackPass, index: int, w: LayerWeights, x: Tensor, added: Tensor | None, rows: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor, _Kept]:
    """One layer but for its last product: the stream, what enters that product, and what is kept."""
    product, eps = stack_pass.product, stack_pass.rotation.eps
    y, s = add_rms_norm(x, added, w.attention_norm, eps, reuse=True)
    fused = product(y, w.qkv, w.qkv_bias)
    q, k, v = rotate(fused, _rotation(stack_pass, w))
    mixed, how = attended(stack_pass.attend, index, q, k, v)  # kept or not: the same kernels give the same bits again
    before = _Before(s, y, fused, how) if keep else s
    del q, k, v, how, fused
    if rows is not None:  # past the last attention nobody looks at the others any more
        s, mixed = s.index_select(0, rows), mixed.index_select(0, rows)
    y, s = add_rms_norm(s, product(mixed, w.output, w.output_bias), w.mlp_norm, eps, reuse=True)
    wide = product(y, w.gate_up)
    inner = swiglu(wide)
    return s, inner, before if isinstance(before, Tensor) else (before, _Behind(mixed, s, y, wide, inner))


def _rotation(stack_pass: StackPass, w: LayerWeights) -> Rotation:
    return stack_pass.rotation if w.q_norm is None else stack_pass.rotation.with_norms(w.q_norm, w.k_norm)


class _Stack(torch.autograd.Function):
    """The gradient of a layer's input is that of the sum which the next norm makes of stream and addition."""

    @staticmethod
    def forward(ctx: Any, stack_pass: StackPass, x: Tensor, norm: Tensor, *flat: Tensor | None) -> Tensor:
        layers, needs = _layers(flat), _layers(ctx.needs_input_grad[3:])
        lowest = 0 if ctx.needs_input_grad[1] else next((n for n, need in enumerate(needs) if any(need)), len(needs))
        last = len(layers) - 1
        activations: list[_Kept] = []
        added = None
        for index, w in enumerate(layers):
            rows, keep = stack_pass.rows if index == last else None, index >= max(stack_pass.recompute, lowest)
            x, inner, what = _forward(stack_pass, index, w, x, added, rows, keep)
            added = stack_pass.product(inner, w.down)
            if index >= lowest:
                activations.append(what)
            del inner, what
        y, s = add_rms_norm(x, added, norm, stack_pass.rotation.eps, reuse=True)
        # Not the result itself: what a node keeps of its own result is never freed.
        ctx.given, ctx.kept, ctx.last, ctx.lowest = stack_pass, activations, s, lowest
        ctx.save_for_backward(norm, *flat)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        norm, *flat = ctx.saved_tensors
        activations, last, ctx.kept, ctx.last = ctx.kept, ctx.last, None, None
        if activations is None:
            raise RuntimeError("the layers' activations are gone: backward runs through a fused decoder once")
        back = _Backward(ctx.given, norm, ctx.needs_input_grad[2], _layers(flat), _layers(ctx.needs_input_grad[3:]))
        by_x = back.end(last, gradients[0])
        for index in reversed(range(ctx.lowest, len(back.layers))):
            by_x = back.layer(index, activations.pop(), by_x)
        return None, by_x if ctx.needs_input_grad[1] else None, *back.weights()


class _Backward:
    """The gradient on its way down through the layers, and what the weights have got so far."""

    def __init__(
        self,
        stack_pass: StackPass,
        norm: Tensor,
        need_norm: bool,
        layers: list[LayerWeights],
        needs: list[LayerWeights],
    ) -> None:
        self._given, self._norm, self._need_norm, self.layers, self._needs = stack_pass, norm, need_norm, layers, needs
        self._found: list[list[Tensor | None]] = [[None] * len(LayerWeights._fields) for _ in layers]
        """Of each layer, in the order of its weights."""
        rows = len(stack_pass.rotation.positions)
        self._parts = norm_parts(2 * len(layers) + 1, rows, norm)
        self._part = self._parts.unbind(0)
        """Two for each layer, then the last norm's."""
        self._head_parts = None
        if layers and layers[0].q_norm is not None:
            self._head_parts = head_parts(len(layers), rows, _rotation(stack_pass, layers[0]))

    def end(self, s: Tensor, by_y: Tensor) -> Tensor:
        """Through the last norm, whose result's gradient may be somebody else's too."""
        part = self._part[-1] if self._need_norm else None
        return norm_gradient(s, self._norm, self._given.rotation.eps, by_y, None, part, reuse=False)

    def layer(self, index: int, saved: _Kept, by_sum: Tensor) -> Tensor:
        """Through one layer: from the gradient of the sum behind it to that of the sum before it."""
        stack_pass, w = self._given, self.layers[index]
        rows = stack_pass.rows if index == len(self.layers) - 1 else None
        if isinstance(saved, Tensor):
            saved = _forward(stack_pass, index, w, saved, None, rows, True)[2]
            assert not isinstance(saved, Tensor)
        before, behind = saved
        del saved
        by_s, by_mixed = self._behind(index, behind, by_sum)
        del behind
        if rows is not None:
            by_s, by_mixed = (x.new_zeros(len(before.s), x.shape[1]).index_add_(0, rows, x) for x in (by_s, by_mixed))
        return self._before(index, before, by_s, by_mixed)

    def _behind(self, index: int, saved: _Behind, by_sum: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the stream and of the attention's mixture."""
        w, need, gradients = self.layers[index], self._needs[index], self._found[index]
        mixed, s, y, wide, inner = saved
        if need.down:
            gradients[9] = torch.mm(by_sum.t(), inner)
        by_wide = swiglu_gradient(wide, torch.mm(by_sum, w.down))
        if need.gate_up:
            gradients[8] = torch.mm(by_wide.t(), y)
        part = self._part[2 * index + 1] if need.mlp_norm else None
        by_s = norm_gradient(s, w.mlp_norm, self._given.rotation.eps, torch.mm(by_wide, w.gate_up), by_sum, part)
        if need.output:
            gradients[5] = torch.mm(by_s.t(), mixed)
        if need.output_bias:
            gradients[6] = by_s.sum(0)
        return by_s, torch.mm(by_s, w.output)

    def _before(self, index: int, saved: _Before, by_s: Tensor, by_mixed: Tensor) -> Tensor:
        w, need, gradients = self.layers[index], self._needs[index], self._found[index]
        by_q, by_k, by_v = saved.attended.gradient(by_mixed)
        part = None if self._head_parts is None else self._head_parts[index]
        by_fused = rotate_gradient(saved.fused, _rotation(self._given, w), by_q, by_k, by_v, part)
        if need.qkv:
            gradients[1] = torch.mm(by_fused.t(), saved.y)
        if need.qkv_bias:
            gradients[2] = by_fused.sum(0)
        part = self._part[2 * index] if need.attention_norm else None
        return norm_gradient(saved.s, w.attention_norm, self._given.rotation.eps, torch.mm(by_fused, w.qkv), by_s, part)

    def weights(self) -> list[Tensor | None]:
        """The gradients of the last norm and of every layer's weights."""
        sums = added_up(self._parts, self._norm.dtype)
        for index, (need, own) in enumerate(zip(self._needs, self._found, strict=True)):
            own[0] = sums[2 * index] if need.attention_norm else None
            own[7] = sums[2 * index + 1] if need.mlp_norm else None
        if self._head_parts is not None:
            by_layer = added_up(self._head_parts, self.layers[0].q_norm.dtype)
            for both, need, own in zip(by_layer, self._needs, self._found, strict=True):
                to_q, to_k = both.chunk(2)
                own[3], own[4] = to_q if need.q_norm else None, to_k if need.k_norm else None
        return [sums[-1] if self._need_norm else None, *(gradient for own in self._found for gradient in own)]


def _layers(flat: Sequence[Any]) -> list[LayerWeights]:
    size = len(LayerWeights._fields)
    return [LayerWeights._make(flat[start : start + size]) for start in range(0, len(flat), size)]
