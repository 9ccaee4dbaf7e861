"""The gradients of what `rows` does, as plain functions: for a caller that writes several steps' backward itself."""

from collections.abc import Callable

import torch
from torch import Tensor

from turnwise.engines.kernels.dispatch import use_triton
from turnwise.engines.kernels.rows import Rotation, add_rms_norm, rotate, swiglu


def norm_gradient(
    s: Tensor, weight: Tensor, eps: float, by_y: Tensor, by_s: Tensor, wants_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Of `add_rms_norm`, from the gradients of y and of s: what x and the residual both get, and the weight."""
    if use_triton(s):
        from turnwise.engines.kernels import triton_rows

        return triton_rows.norm_gradient(s, weight, eps, by_y, by_s, wants_weight)
    to_s, to_weight = _by_autograd(lambda s, w: (add_rms_norm(s, None, w, eps)[0],), (s, weight), (by_y,))
    return to_s + by_s, to_weight if wants_weight else None


def swiglu_gradient(gate_up: Tensor, by_y: Tensor) -> Tensor:
    """Of `swiglu`; `gate_up` has no gaps."""
    if use_triton(gate_up):
        from turnwise.engines.kernels import triton_rows

        return triton_rows.gated_gradient(gate_up, by_y)
    return _by_autograd(lambda gate_up: (swiglu(gate_up),), (gate_up,), (by_y,))[0]


def rotate_gradient(
    fused: Tensor | None, rotation: Rotation, by_q: Tensor, by_k: Tensor, by_v: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of `rotate`: what `fused`, q_norm and k_norm get. `fused` itself is needed only where heads are normed."""
    if use_triton(by_q):
        from turnwise.engines.kernels import triton_rotation

        return triton_rotation.turned_gradient(fused, rotation, by_q, by_k, by_v)
    pulls = (by_q, by_k, by_v)
    if fused is None or rotation.q_norm is None or rotation.k_norm is None:
        shape = (len(by_q), sum(by.shape[1] for by in pulls) * rotation.head_dim)
        turn = _by_autograd(lambda fused: rotate(fused, rotation), (by_q.new_zeros(shape),), pulls)
        return turn[0], None, None

    def normed(fused: Tensor, q_norm: Tensor, k_norm: Tensor) -> tuple[Tensor, ...]:
        return rotate(fused, rotation.with_norms(q_norm, k_norm))

    to_fused, to_q, to_k = _by_autograd(normed, (fused, rotation.q_norm, rotation.k_norm), pulls)
    return to_fused, to_q, to_k


def _by_autograd(
    run: Callable[..., tuple[Tensor, ...]], given: tuple[Tensor, ...], pulls: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The gradients of what was given; the reference's backward is torch's own."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in given]
        made = run(*leaves)
    return torch.autograd.grad(made, leaves, pulls)
