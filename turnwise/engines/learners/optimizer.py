"""AdamW for one model, plain or with moments of one byte: float32 masters, learning rate, clipping, state by name."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.config import LearnerConfig
from turnwise.config.choices import Decay, Offload, OptimizerName
from turnwise.engines.learners.adamw_8bit import AdamW8bit, is_small, moment_shapes
from turnwise.engines.learners.gradients import Gradients, is_narrow, total_norm, widened
from turnwise.engines.learners.offloaded import OffloadedSteps, adamw_step
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
        initial = wide or {}
        self.masters = {name: self._master(p, initial.get(name, p)) for name, p in self.parameters.items()}
        self._parts = _adamw(self.masters.values(), config, lr)
        self._staged: dict[str, Tensor] = {}
        """Gradients as the next step takes them."""
        self._steps: list[Callable[[], object]] = []
        """What is left to call for that step."""
        self._elsewhere: OffloadedSteps | None = None
        """Who takes the steps where masters lie in another memory than what is computed with."""
        if self._offload and any(self.masters[name] is not p for name, p in self.parameters.items()):
            self._elsewhere = OffloadedSteps(self.parameters, self.masters, self._parts, self._device)

    def _master(self, parameter: nn.Parameter, source: Tensor) -> nn.Parameter:
        home = torch.device("cpu") if self._offload else parameter.device
        if not is_narrow(parameter) and parameter.device == home:
            return parameter
        return nn.Parameter(source.detach().to(home, torch.float32, copy=True))

    def gradient_norm(self) -> Tensor:
        """Of all gradients together, still on the device; 0 when there are none. A step is to follow."""
        gradients = self.gradients.total()
        norm = total_norm(gradients, self._device)
        if self._elsewhere is None:
            self._stage(gradients)  # while the device is at work: a caller that waits for the norm has less to do then
        return norm

    def broken(self) -> list[str]:
        """Parameters whose gradient is not finite."""
        return [name for name, gradient in self.gradients.total().items() if not bool(gradient.isfinite().all())]

    @torch.no_grad()
    def update(self, step: int, norm: float) -> float:
        """Clip by the norm, take one step and forget the gradients; returns the learning rate."""
        lr, limit = lr_at(step, self._lr, self._config, self._updates), self._config.grad_clip
        scale = limit / norm if limit < norm else None
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = lr
        if self._elsewhere is not None:
            self._elsewhere.take(self.gradients.total(), scale)
        else:
            self._take(scale)
        self.forget()
        return lr

    def _take(self, scale: float | None) -> None:
        """The step on masters that lie where gradients do."""
        if not self._staged:
            self._stage(self.gradients.total())
        if scale is not None and self._staged:
            torch._foreach_mul_(list(self._staged.values()), scale)
        for take in self._steps:
            take()
        self._publish(self._staged)

    def _stage(self, gradients: Mapping[str, Tensor]) -> None:
        """All that a step needs beside its learning rate."""
        self._staged = widened(gradients)
        for name, gradient in self._staged.items():
            self.masters[name].grad = gradient
        self._steps = [step for part in self._parts for step in _steps_of(part)]

    def _publish(self, names: Iterable[str]) -> None:
        """Round masters that changed into the weights that are computed with."""
        if self._elsewhere is not None:
            self._elsewhere.publish(names)
            return
        apart = [name for name in names if self.masters[name] is not self.parameters[name]]
        if apart:
            torch._foreach_copy_([self.parameters[n].data for n in apart], [self.masters[n].data for n in apart])

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
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            moments = self._part(master).state.get(master, {})
            tensors.update({f"{name}.{kind}": tensor.detach() for kind, tensor in moments.items()})
        return tensors

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
            own = {k: moments[f"{name}.{k}"] for k in self._shapes(master) if f"{name}.{k}" in moments}
            copies = {k: torch.empty_like(t, device=_home(part, k, master)).copy_(t) for k, t in own.items()}
            if copies:
                part.state[master] = copies

    def _part(self, master: nn.Parameter) -> torch.optim.Optimizer:
        """The one that trains a parameter."""
        return self._parts[0] if len(self._parts) == 1 or is_small(master) else self._parts[1]

    def _shapes(self, master: nn.Parameter) -> dict[str, torch.Size]:
        if isinstance(self._part(master), AdamW8bit):
            return moment_shapes(master)
        return {"exp_avg": master.shape, "exp_avg_sq": master.shape, "step": torch.Size(())}


def _adamw(masters: Iterable[nn.Parameter], config: LearnerConfig, lr: float) -> list[torch.optim.Optimizer]:
    """One AdamW; or, with 8-bit moments, torch's own for what is small and another for the rest."""
    all_of_them, betas = list(masters), (0.9, config.beta2)
    if config.optimizer is OptimizerName.adamw:
        return [torch.optim.AdamW(_groups(all_of_them, config), lr=lr, betas=betas, fused=True)]
    small = _groups([m for m in all_of_them if is_small(m)], config)
    large = _groups([m for m in all_of_them if not is_small(m)], config)
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
        states = [part.state.get(master) for master in masters]
        if not all(states):
            return [part.step]
        moments = ([state[kind] for state in states if state] for kind in ("exp_avg", "exp_avg_sq", "step"))
        steps.append(partial(_adamw_step, group, masters, *moments))
    return steps


def _adamw_step(
    group: dict[str, Any], masters: list[Tensor], first: list[Tensor], second: list[Tensor], counts: list[Tensor]
) -> None:
    gradients = [master.grad for master in masters if master.grad is not None]
    adamw_step(group, masters, gradients, first, second, counts)


def _groups(masters: list[nn.Parameter], config: LearnerConfig) -> list[dict[str, Any]]:
    """Weight decay is of matrices only: norms and biases are never pulled to zero."""
    matrices, vectors = [p for p in masters if p.dim() > 1], [p for p in masters if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _home(part: torch.optim.Optimizer, kind: str, master: Tensor) -> torch.device:
    return torch.device("cpu") if kind == "step" and isinstance(part, AdamW8bit) else master.device
