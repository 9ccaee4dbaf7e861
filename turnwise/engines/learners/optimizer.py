"""AdamW for one model: warm-up and decay of the learning rate, clipping, and a state that is plain named tensors."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from turnwise.choices import Decay
from turnwise.config import LearnerConfig
from turnwise.errors import EngineError

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps of each parameter."""


def lr_at(step: int, lr: float, config: LearnerConfig, updates: int) -> float:
    """The learning rate of a step, counted from 0: a warm-up to `lr`, then a decay that ends after `updates` steps."""
    if step < config.warmup:
        return lr * (step + 1) / config.warmup
    if config.decay is Decay.constant:
        return lr
    done = min(1.0, (step - config.warmup) / (updates - config.warmup))
    left = 1.0 - done if config.decay is Decay.linear else 0.5 * (1.0 + math.cos(math.pi * done))
    return lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)


class Optimizer:
    """AdamW over named parameters. A parameter without a gradient is left alone, its moments too."""

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], config: LearnerConfig, *, lr: float, updates: int
    ) -> None:
        self._config, self._lr, self._updates = config, lr, updates
        self.parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        if not self.parameters:
            raise EngineError("there is nothing to train: every parameter is frozen")
        # Weight decay is of matrices only: norms and biases are never pulled to zero.
        matrices = [p for p in self.parameters.values() if p.dim() > 1]
        vectors = [p for p in self.parameters.values() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        used = [group for group in groups if group["params"]]
        self._adamw = torch.optim.AdamW(used, lr=lr, betas=(0.9, config.beta2), fused=True)

    def gradient_norm(self) -> float:
        """Of all gradients together; 0 when there are none."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        return float(nn.utils.get_total_norm(gradients, error_if_nonfinite=False)) if gradients else 0.0

    def broken(self) -> list[str]:
        """Parameters whose gradient is not finite."""
        return [n for n, p in self.parameters.items() if p.grad is not None and not bool(p.grad.isfinite().all())]

    def update(self, step: int, norm: float) -> float:
        """Clip by the given norm, take one step and forget the gradients; returns the learning rate."""
        lr, limit = lr_at(step, self._lr, self._config, self._updates), self._config.grad_clip
        if limit < norm:
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
