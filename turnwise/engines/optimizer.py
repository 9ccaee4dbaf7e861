"""AdamW for one model: warm-up and decay of the learning rate, clipping, and a state that is plain named tensors."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from turnwise.choices import Decay
from turnwise.errors import EngineError

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps of each parameter."""


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """How one model learns: `OptimizerSettings(lr=1e-6, warmup_steps=10, decay=Decay.cosine, total_steps=200)`."""

    lr: float
    weight_decay: float = 0.0
    """Of matrices only; norms and biases are never pulled to zero."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    """Longer gradients are shortened to this norm; 0 leaves them as they are."""
    warmup_steps: int = 0
    decay: Decay = Decay.constant
    total_steps: int = 0
    """Where the decay ends, counted from the first step; it needs no value when the rate is constant."""
    final_ratio: float = 0.0
    """The share of the learning rate that is left at the end of the decay."""

    def __post_init__(self) -> None:
        if not (self.lr >= 0.0 and self.weight_decay >= 0.0 and self.max_grad_norm >= 0.0 and self.eps > 0.0):
            raise EngineError(f"learning rate, decay, gradient norm and eps must not be negative: {self}")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise EngineError(f"betas must be at least 0 and below 1, found {self.betas}")
        if self.warmup_steps < 0 or not 0.0 <= self.final_ratio <= 1.0:
            raise EngineError(f"warmup_steps cannot be negative and final_ratio is a share: {self}")
        if self.decay is not Decay.constant and self.total_steps <= self.warmup_steps:
            raise EngineError(
                f"a {self.decay.value} decay over {self.total_steps} steps must outlast {self.warmup_steps} of warm-up"
            )


def lr_at(step: int, settings: OptimizerSettings) -> float:
    """The learning rate of a step, counted from 0."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.decay is Decay.constant:
        return settings.lr
    done = min(1.0, (step - settings.warmup_steps) / (settings.total_steps - settings.warmup_steps))
    left = 1.0 - done if settings.decay is Decay.linear else 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.lr * (settings.final_ratio + (1.0 - settings.final_ratio) * left)


class Optimizer:
    """AdamW over named parameters. A parameter without a gradient is left alone, its moments too."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], settings: OptimizerSettings) -> None:
        self.settings = settings
        self.parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        if not self.parameters:
            raise EngineError("there is nothing to train: every parameter is frozen")
        matrices = [p for p in self.parameters.values() if p.dim() > 1]
        vectors = [p for p in self.parameters.values() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )

    def gradient_norm(self) -> float:
        """Of all gradients together; 0 when there are none."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        return float(nn.utils.get_total_norm(gradients, error_if_nonfinite=False)) if gradients else 0.0

    def broken(self) -> list[str]:
        """Parameters whose gradient is not finite."""
        return [n for n, p in self.parameters.items() if p.grad is not None and not bool(p.grad.isfinite().all())]

    def update(self, step: int, norm: float) -> float:
        """Clip by the given norm, take one step and forget the gradients; returns the learning rate."""
        lr = lr_at(step, self.settings)
        limit = self.settings.max_grad_norm
        if 0.0 < limit < norm:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(limit / norm)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.forget()
        return lr

    def forget(self) -> None:
        """Drop the accumulated gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """The moments as `NAME.exp_avg`, `NAME.exp_avg_sq` and `NAME.step`; nothing of what was never trained."""
        kept: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            moments = self._adamw.state.get(parameter, {})
            kept.update({f"{name}.{kind}": moments[kind].detach() for kind in _MOMENTS if kind in moments})
        return kept

    def expected(self, name: str) -> torch.Size | None:
        """The shape of one tensor of the state, None for a name that has no place in it."""
        owner, _, kind = name.rpartition(".")
        if owner not in self.parameters or kind not in _MOMENTS:
            return None
        return torch.Size(()) if kind == "step" else self.parameters[owner].shape

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned, names and shapes already checked."""
        self.forget()
        self._adamw.state.clear()
        for name, parameter in self.parameters.items():
            moments = {kind: tensors[f"{name}.{kind}"] for kind in _MOMENTS if f"{name}.{kind}" in tensors}
            if moments:
                copies = {k: torch.empty_like(t, device=parameter.device).copy_(t) for k, t in moments.items()}
                self._adamw.state[parameter] = copies
