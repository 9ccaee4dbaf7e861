"""AdamW for one model, plain or with moments of one byte: float32 masters, learning rate, clipping, state by name."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.adamw import adamw

from turnwise.config import LearnerConfig
from turnwise.config.choices import Decay, Offload, OptimizerName
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
        initial = wide or {}
        self.masters = {name: self._master(p, initial.get(name, p)) for name, p in self.parameters.items()}
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


BLOCK = 256
SMALL = 4096
"""Tensors of fewer numbers are not worth it: their moments stay float32, in torch's own AdamW."""
GOLDEN = 0.6180339887498949
"""Multiples of it fill the unit interval evenly."""


def is_small(parameter: Tensor) -> bool:
    """Whether a parameter's moments stay float32."""
    return parameter.numel() < SMALL


def moment_shapes(parameter: Tensor) -> dict[str, torch.Size]:
    """The shapes of the tensors that the optimizer keeps for a parameter, by name."""
    blocks = -(-parameter.numel() // BLOCK)
    codes, scales = torch.Size((blocks, BLOCK)), torch.Size((blocks,))
    return {
        "exp_avg_8bit": codes,
        "exp_avg_scale": scales,
        "exp_avg_sq_8bit": codes,
        "exp_avg_sq_scale": scales,
        "step": torch.Size(()),
    }


class AdamW8bit(torch.optim.Optimizer):
    """AdamW over parameters that are not small, whose two moments take one byte each; blocks share a float32 scale.

    The first moment is kept as a signed square root of its share of the block's largest, the second as a fourth root:
    both maps spend most of their steps on small numbers. A second moment changes by less than one of its steps per
    update, so where it is rounded moves from update to update, evenly and without chance: it follows its mean, and a
    run that is resumed rounds as one that was not. `state` has the tensors that `moment_shapes` names.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    moments = self.state[parameter]
                    if not moments:
                        moments.update(_zeros(parameter))
                    _update(parameter, parameter.grad, moments, group)


def _zeros(parameter: Tensor) -> dict[str, Tensor]:
    dtypes = {"exp_avg_8bit": torch.int8, "exp_avg_sq_8bit": torch.uint8}
    tensors = {
        name: torch.zeros(shape, dtype=dtypes.get(name, torch.float32), device=parameter.device)
        for name, shape in moment_shapes(parameter).items()
    }
    return tensors | {"step": tensors["step"].cpu()}  # counted on the host: reading it must not wait for the device


def _update(parameter: Tensor, gradient: Tensor, moments: dict[str, Tensor], group: dict[str, Any]) -> None:
    (beta1, beta2), lr, count = group["betas"], group["lr"], parameter.numel()
    moments["step"] += 1
    step = int(moments["step"].item())
    blocks = moments["exp_avg_8bit"].shape
    flat = functional.pad(gradient.reshape(-1), (0, blocks.numel() - count)).view(blocks)
    first = signed_numbers(moments["exp_avg_8bit"], moments["exp_avg_scale"]).lerp_(flat, 1.0 - beta1)
    second = unsigned_numbers(moments["exp_avg_sq_8bit"], moments["exp_avg_sq_scale"])
    second.mul_(beta2).addcmul_(flat, flat, value=1.0 - beta2)
    divisor = (second / (1.0 - beta2**step)).sqrt_().add_(group["eps"])
    change = (first / divisor).view(-1)[:count].view(parameter.shape)
    parameter.mul_(1.0 - lr * group["weight_decay"]).sub_(change, alpha=lr / (1.0 - beta1**step))
    moments["exp_avg_8bit"], moments["exp_avg_scale"] = signed_codes(first)
    moments["exp_avg_sq_8bit"], moments["exp_avg_sq_scale"] = unsigned_codes(second, (step * GOLDEN) % 1.0 - 0.5)


def signed_codes(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [blocks, BLOCK] and scales [blocks] of numbers [blocks, BLOCK] of either sign."""
    scales, shares = _shares(numbers.abs())
    return shares.sqrt_().mul_(127.0).copysign_(numbers).round_().to(torch.int8), scales


def signed_numbers(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers of `signed_codes`."""
    roots = codes.float().div_(127.0)
    return roots.mul_(roots.abs()).mul_(scales.unsqueeze(1))


def unsigned_codes(numbers: Tensor, shift: float) -> tuple[Tensor, Tensor]:
    """The same of numbers from 0 up; `shift` from -0.5 to 0.5 moves where they are rounded.

    What is more than 0 stays so: a second moment of 0 would divide a first one by nothing.
    """
    scales, shares = _shares(numbers)
    codes = shares.sqrt_().sqrt_().mul_(255.0).add_(shift).round_().clamp_(1.0, 255.0)
    return codes.mul_(numbers > 0).to(torch.uint8), scales


def unsigned_numbers(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers of `unsigned_codes`."""
    return codes.float().div_(255.0).square_().square_().mul_(scales.unsqueeze(1))


def _shares(sizes: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each block, and every number over it."""
    scales = sizes.amax(dim=1)
    return scales, sizes / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
