"""AdamW whose moments take one byte each: blocks of numbers share a scale, and rounding follows the mean."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

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
                        moments.update(zero_moments(parameter))
                    update(parameter, parameter.grad, moments, group)


def zero_moments(parameter: Tensor) -> dict[str, Tensor]:
    """What the optimizer keeps for a parameter before its first step."""
    dtypes = {"exp_avg_8bit": torch.int8, "exp_avg_sq_8bit": torch.uint8}
    tensors = {
        name: torch.zeros(shape, dtype=dtypes.get(name, torch.float32), device=parameter.device)
        for name, shape in moment_shapes(parameter).items()
    }
    return tensors | {"step": tensors["step"].cpu()}  # counted on the host: reading it must not wait for the device


def update(parameter: Tensor, gradient: Tensor, moments: dict[str, Tensor], group: dict[str, Any]) -> None:
    """One step of a parameter, or of whole blocks of one; `moments` then names what follows it."""
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
