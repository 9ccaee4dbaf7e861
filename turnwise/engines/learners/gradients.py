"""Gradients of a minibatch while its micro-batches come in: sums in float32, and one that fails leaves no trace."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def is_narrow(tensor: Tensor) -> bool:
    """Whether a number format has too few digits to add many small things up."""
    return tensor.is_floating_point() and tensor.dtype.itemsize < 4


class Gradients:
    """Of named parameters. A float32 parameter holds its own sum; those of narrow ones lie here, once there are two."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._wide = {name: p for name, p in parameters.items() if not is_narrow(p)}
        self._narrow = {name: p for name, p in parameters.items() if is_narrow(p)}
        self._sums: dict[str, Tensor] = {}

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Around the backward pass of a micro-batch: what it leaves is added if it ends well, and dropped if not."""
        self._gather()
        before = {p: p.grad for p in self._wide.values() if p.grad is not None}
        for parameter in before:
            parameter.grad = None
        try:
            yield
        except BaseException:
            self._clear()
            for parameter, gradient in before.items():
                parameter.grad = gradient
            raise
        more = [(gradient, p.grad) for p, gradient in before.items() if p.grad is not None]
        if more:
            _add([gradient for gradient, _ in more], [new for _, new in more])
        for parameter, gradient in before.items():
            parameter.grad = gradient

    def total(self) -> dict[str, Tensor]:
        """By name, of what has one: in float32, or narrow where there was only one micro-batch."""
        if self._sums:
            self._gather()
        narrow = self._sums or {name: p.grad for name, p in self._narrow.items() if p.grad is not None}
        return {name: p.grad for name, p in self._wide.items() if p.grad is not None} | narrow

    @property
    def waiting(self) -> bool:
        """Whether there are gradients that no optimizer step has used yet."""
        return bool(self._sums) or any(p.grad is not None for p in (*self._wide.values(), *self._narrow.values()))

    def forget(self) -> None:
        """Drops all gradients, those of parameters and their sums."""
        self._sums.clear()
        self._clear()

    def _clear(self) -> None:
        for parameter in (*self._wide.values(), *self._narrow.values()):
            parameter.grad = None

    def _gather(self) -> None:
        """Add what narrow parameters hold to their sums."""
        gradients = {name: p.grad for name, p in self._narrow.items() if p.grad is not None}
        old = [name for name in gradients if name in self._sums]
        new = widened({name: gradient for name, gradient in gradients.items() if name not in self._sums})  # may not fit
        if old:
            _add([self._sums[name] for name in old], [gradients[name] for name in old])
        self._sums |= new
        for name in gradients:
            self._narrow[name].grad = None


def widened(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same in float32; what is float32 already is not copied."""
    wide = {name: torch.empty_like(t, dtype=torch.float32) if is_narrow(t) else t for name, t in tensors.items()}
    changed = [name for name, tensor in tensors.items() if wide[name] is not tensor]
    if changed:
        torch._foreach_copy_([wide[name] for name in changed], [tensors[name] for name in changed])
    return wide


def total_norm(gradients: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """The norm of all together, still on the device; 0 when there are none."""
    if not gradients:
        return torch.zeros((), device=device)
    if not any(is_narrow(gradient) for gradient in gradients.values()):
        return nn.utils.get_total_norm(list(gradients.values()), error_if_nonfinite=False)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients.values():
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    norms = [norm for tensors in by_dtype.values() for norm in torch._foreach_norm(tensors, 2.0, dtype=torch.float32)]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _add(sums: list[Tensor], more: list[Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_add_(sums, more)
