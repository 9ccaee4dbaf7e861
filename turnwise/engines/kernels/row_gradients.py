"""The gradients of what `rows` does, as plain functions: for a caller that writes several steps' backward itself.

The weights of norms get theirs together: each gradient leaves partial sums in room made for all, and `added_up` adds
them. What a gradient is said to use up may hold something else afterwards.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from turnwise.engines.kernels.dispatch import use_triton
from turnwise.engines.kernels.rows import Rotation, add_rms_norm, rotate, swiglu


def norm_parts(norms: int, rows: int, weight: Tensor) -> Tensor:
    """Room [norms, P, H] for the gradients of weights like this one, of norms over at most so many rows."""
    if use_triton(weight):
        from turnwise.engines.kernels.triton import rows as triton_rows

        return triton_rows.norm_parts(norms, rows, weight)
    return torch.empty((norms, 1, len(weight)), dtype=weight.dtype, device=weight.device)


def head_parts(layers: int, rows: int, rotation: Rotation) -> Tensor:
    """Room [layers, P, 2 D] for the gradients of the norms of queries and keys, one behind the other."""
    if use_triton(rotation.cos):
        from turnwise.engines.kernels.triton import rotation as triton_rotation

        return triton_rotation.head_parts(layers, rows, rotation)
    assert rotation.q_norm is not None
    return torch.empty((layers, 1, 2 * rotation.head_dim), dtype=rotation.q_norm.dtype, device=rotation.cos.device)


def added_up(parts: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The gradients themselves, by place; of a place that nothing was left in, anything."""
    if use_triton(parts):
        from turnwise.engines.kernels.triton import rows as triton_rows

        return triton_rows.column_sums(parts, dtype).unbind(0)
    return parts.sum(1).to(dtype).unbind(0)


def norm_gradient(
    s: Tensor, weight: Tensor, eps: float, by_y: Tensor, by_s: Tensor | None, part: Tensor | None, *, reuse: bool = True
) -> Tensor:
    """Of `add_rms_norm`, from the gradients of y and of s: what x and the residual both get.

    The weight's goes into `part` [P, H] if there is one. `by_y` is used up, unless it is not to be reused.
    """
    if use_triton(s):
        from turnwise.engines.kernels.triton import rows as triton_rows

        return triton_rows.norm_gradient(s, weight, eps, by_y, by_s, part, reuse=reuse)
    to_s, to_weight = _by_autograd(lambda s, w: (add_rms_norm(s, None, w, eps)[0],), (s, weight), (by_y,))
    if part is not None:
        part[0] = to_weight
    return to_s if by_s is None else to_s + by_s


def swiglu_gradient(gate_up: Tensor, by_y: Tensor) -> Tensor:
    """Of `swiglu`; `gate_up` has no gaps and is used up."""
    if use_triton(gate_up):
        from turnwise.engines.kernels.triton import rows as triton_rows

        return triton_rows.gated_gradient(gate_up, by_y, reuse=True)
    return _by_autograd(lambda gate_up: (swiglu(gate_up),), (gate_up,), (by_y,))[0]


def rotate_gradient(
    fused: Tensor, rotation: Rotation, by_q: Tensor, by_k: Tensor, by_v: Tensor, part: Tensor | None
) -> Tensor:
    """Of `rotate`: what `fused` gets, which has no gaps and is used up.

    Where heads are normed, `part` [P, 2 D] takes what q_norm and k_norm get.
    """
    normed = rotation.q_norm is not None
    if use_triton(by_q):
        from turnwise.engines.kernels.triton import rotation as triton_rotation

        # With norms it is read while the answer is written.
        return triton_rotation.turned_gradient(fused, rotation, by_q, by_k, by_v, part, into=None if normed else fused)
    pulls = (by_q, by_k, by_v)
    if rotation.q_norm is None or rotation.k_norm is None or part is None:
        return _by_autograd(lambda fused: rotate(fused, rotation), (fused,), pulls)[0]

    def turned(fused: Tensor, q_norm: Tensor, k_norm: Tensor) -> tuple[Tensor, ...]:
        return rotate(fused, rotation.with_norms(q_norm, k_norm))

    to_fused, *to_norms = _by_autograd(turned, (fused, rotation.q_norm, rotation.k_norm), pulls)
    part[0] = torch.cat(to_norms)
    return to_fused


def _by_autograd(
    run: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...], pulls: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The gradients of the inputs; the reference's backward is torch's own."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        outputs = run(*leaves)
    return torch.autograd.grad(outputs, leaves, pulls)
