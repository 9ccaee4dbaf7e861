"""AdamW for one model: float32 masters of narrow weights, learning rate, clipping, and a state of named tensors."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from turnwise.choices import Decay, Offload, OptimizerName
from turnwise.config import LearnerConfig
from turnwise.engines.learners import adamw8bit
from turnwise.engines.learners.adamw8bit import AdamW8bit
from turnwise.engines.learners.gradients import Gradients, is_narrow, total_norm, widened
from turnwise.errors import EngineError


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
    """AdamW over named parameters. A parameter without a gradient is left alone, its moments too.

    Steps are taken on masters: float32 tensors that small steps do not vanish in. A float32 parameter is its own, one
    in bfloat16 has one beside it, made from `wide` (by name) where the caller has more digits than the parameter. With
    `learner.offload=optimizer` masters and moments lie in the CPU's memory and the step is taken there.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: LearnerConfig,
        *,
        lr: float,
        updates: int,
        wide: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._config, self._lr, self._updates = config, lr, updates
        self.parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        if not self.parameters:
            raise EngineError("there is nothing to train: every parameter is frozen")
        self._device = next(iter(self.parameters.values())).device
        self._offload = config.offload is Offload.optimizer
        self.gradients = Gradients(self.parameters)
        given = wide or {}
        self.masters = {name: self._master(p, given.get(name, p)) for name, p in self.parameters.items()}
        self._parts = _adamw(self.masters.values(), config, lr)
        self._staged: dict[str, Tensor] = {}
        """Gradients as the next step takes them."""
        self._steps: list[Callable[[], object]] = []
        """What is left to call for that step."""
        self._staging: dict[str, Tensor] = {}
        """With offload, page-locked memory that gradients come down to."""

    def _master(self, parameter: nn.Parameter, source: Tensor) -> nn.Parameter:
        home = torch.device("cpu") if self._offload else parameter.device
        if not is_narrow(parameter) and parameter.device == home:
            return parameter
        master = source.detach().to(home, torch.float32, copy=True)
        # A narrow weight's never travels itself: gradients come down and rounded copies go up.
        return nn.Parameter(master if is_narrow(parameter) else _pinned(master, self._device))

    def gradient_norm(self) -> Tensor:
        """Of all gradients together, still on the device; 0 when there are none. A step is to follow."""
        gradients = self.gradients.total()
        norm = total_norm(gradients, self._device)
        self._stage(gradients)  # while the device is at work: a caller that waits for the norm has less to do then
        return norm

    def broken(self) -> list[str]:
        """Parameters whose gradient is not finite."""
        return [name for name, gradient in self.gradients.total().items() if not bool(gradient.isfinite().all())]

    @torch.no_grad()
    def update(self, step: int, norm: float) -> float:
        """Clip by the norm, take one step and forget the gradients; returns the learning rate."""
        lr, limit = lr_at(step, self._lr, self._config, self._updates), self._config.grad_clip
        if not self._staged:
            self._stage(self.gradients.total())
        gradients = self._staged
        if self._offload and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the CPU reads what has come down
        if limit < norm and gradients:
            torch._foreach_mul_(list(gradients.values()), limit / norm)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = lr
        for take in self._steps:
            take()
        self._publish(gradients)
        self.forget()
        return lr

    def _stage(self, gradients: Mapping[str, Tensor]) -> None:
        """All that a step needs beside its learning rate."""
        self._staged = self._at_home(gradients)
        for name, gradient in self._staged.items():
            self.masters[name].grad = gradient
        self._steps = [step for part in self._parts for step in _steps_of(part)]

    def _at_home(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients in float32 where the masters are."""
        wide = widened(gradients)
        away = [name for name, gradient in wide.items() if gradient.device != self.masters[name].device]
        for name in away:
            if name not in self._staging:
                self._staging[name] = _pinned(torch.empty_like(self.masters[name]), self._device)
            wide[name] = self._staging[name].copy_(wide[name], non_blocking=True)
        return wide

    def _publish(self, names: Iterable[str]) -> None:
        """Round masters that changed into the weights that are computed with."""
        apart = [name for name in names if self.masters[name] is not self.parameters[name]]
        if not apart:
            return
        working = [self.parameters[name].data for name in apart]
        masters = [self.masters[name].data for name in apart]
        if masters[0].device != working[0].device:  # rounded before they travel: half the bytes
            masters = [_pinned(m.to(w.dtype), self._device) for m, w in zip(masters, working, strict=True)]
            for weight, master in zip(working, masters, strict=True):
                weight.copy_(master, non_blocking=True)
        else:
            torch._foreach_copy_(working, masters)

    def forget(self) -> None:
        """Drop the accumulated gradients."""
        self.gradients.forget()
        self._staged, self._steps = {}, []
        for master in self.masters.values():
            master.grad = None

    @property
    def gradient_bytes(self) -> int:
        """What a pass leaves on the device, and the sums of several."""
        return sum(p.numel() * (6 if is_narrow(p) else 4) for p in self.parameters.values())

    def moments_to_come(self) -> int:
        """Bytes that the first step will add on the device."""
        if self._offload or any(part.state for part in self._parts):
            return 0
        each = 2 if self._config.optimizer is OptimizerName.adamw8bit else 8
        return each * sum(master.numel() for master in self.masters.values())

    def state(self) -> dict[str, Tensor]:
        """The moments as `NAME.exp_avg`, `NAME.exp_avg_sq` and `NAME.step`; nothing of what was never trained."""
        kept: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            moments = self._part(master).state.get(master, {})
            kept.update({f"{name}.{kind}": tensor.detach() for kind, tensor in moments.items()})
        return kept

    def expected(self, name: str) -> torch.Size | None:
        """The shape of one tensor of the state, None for a name that has no place in it."""
        owner, _, kind = name.rpartition(".")
        return self._shapes(self.masters[owner]).get(kind) if owner in self.masters else None

    def load(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Take over masters and what `state` returned, names and shapes already checked."""
        self.forget()
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(weights[name])
            self._publish(self.masters)
        for part in self._parts:
            part.state.clear()
        for name, master in self.masters.items():
            part = self._part(master)
            found = {k: moments[f"{name}.{k}"] for k in self._shapes(master) if f"{name}.{k}" in moments}
            copies = {k: torch.empty_like(t, device=_home(part, k, master)).copy_(t) for k, t in found.items()}
            if copies:
                part.state[master] = copies

    def _part(self, master: nn.Parameter) -> torch.optim.Optimizer:
        """The one that trains a parameter."""
        return self._parts[0] if len(self._parts) == 1 or adamw8bit.is_small(master) else self._parts[1]

    def _shapes(self, master: nn.Parameter) -> dict[str, torch.Size]:
        if isinstance(self._part(master), AdamW8bit):
            return adamw8bit.moment_shapes(master)
        return {"exp_avg": master.shape, "exp_avg_sq": master.shape, "step": torch.Size(())}


def _adamw(masters: Iterable[nn.Parameter], config: LearnerConfig, lr: float) -> list[torch.optim.Optimizer]:
    """One AdamW; or, with 8-bit moments, torch's own for what is small and another for the rest."""
    all_of_them, betas = list(masters), (0.9, config.beta2)
    if config.optimizer is OptimizerName.adamw:
        return [torch.optim.AdamW(_groups(all_of_them, config), lr=lr, betas=betas, fused=True)]
    small = _groups([m for m in all_of_them if adamw8bit.is_small(m)], config)
    large = _groups([m for m in all_of_them if not adamw8bit.is_small(m)], config)
    parts: list[torch.optim.Optimizer] = []
    if small:
        parts.append(torch.optim.AdamW(small, lr=lr, betas=betas, fused=True))
    if large:
        parts.append(AdamW8bit(large, lr=lr, betas=betas))
    return parts


def _steps_of(part: torch.optim.Optimizer) -> list[Callable[[], object]]:
    """`part.step`; of torch's AdamW the same by group, with the tensors looked up already, once they have moments."""
    if isinstance(part, AdamW8bit):
        return [part.step]
    steps: list[Callable[[], object]] = []
    for group in part.param_groups:
        masters = [master for master in group["params"] if master.grad is not None]
        kept = [part.state.get(master) for master in masters]
        if not all(kept):
            return [part.step]
        moments = ([state[kind] for state in kept if state] for kind in ("exp_avg", "exp_avg_sq", "step"))
        steps.append(partial(_adamw_step, group, masters, *moments))
    return steps


def _adamw_step(
    group: dict[str, Any], masters: list[Tensor], first: list[Tensor], second: list[Tensor], counts: list[Tensor]
) -> None:
    gradients = [master.grad for master in masters if master.grad is not None]
    beta1, beta2 = group["betas"]
    adamw(
        masters,
        gradients,
        first,
        second,
        [],
        counts,
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _groups(masters: list[nn.Parameter], config: LearnerConfig) -> list[dict[str, Any]]:
    """Weight decay is of matrices only: norms and biases are never pulled to zero."""
    matrices, vectors = [p for p in masters if p.dim() > 1], [p for p in masters if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _home(part: torch.optim.Optimizer, kind: str, master: Tensor) -> torch.device:
    return torch.device("cpu") if kind == "step" and isinstance(part, AdamW8bit) else master.device


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """In page-locked memory where it is to travel between the CPU and a GPU."""
    return tensor.pin_memory() if tensor.device.type == "cpu" and device.type == "cuda" else tensor
