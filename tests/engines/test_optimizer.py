"""AdamW with one byte a moment goes where AdamW goes, and one whose state lies elsewhere takes the same steps."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from turnwise.config import LearnerConfig
from turnwise.config.choices import Offload, OptimizerName
from turnwise.engines.learners.adamw_8bit import (
    BLOCK,
    SMALL,
    signed_codes,
    signed_numbers,
    unsigned_codes,
    unsigned_numbers,
)
from turnwise.engines.learners.gradients import total_norm
from turnwise.engines.learners.optimizer import Optimizer


class Regression(nn.Module):
    """A matrix that is not a whole number of blocks, and a bias too small for 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        seeded = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(67, 75, generator=seeded) * 0.1)
        self.bias = nn.Parameter(torch.zeros(67))
        self.target = torch.randn(67, 75, generator=seeded)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight - self.target, self.bias).square().mean()


def train(steps: int, **knobs: Any) -> tuple[list[float], Optimizer, Regression]:
    """Noisy gradients, whose sizes differ by column as those of real weights do."""
    model = Regression()
    config = LearnerConfig(**{"lr": 2e-2, "weight_decay": 0.01, "grad_clip": 1.0, **knobs})
    optimizer = Optimizer(model.named_parameters(), config, lr=config.lr, updates=steps)
    losses = []
    seeded, sizes = torch.Generator().manual_seed(1), torch.logspace(-2, 0.5, 75)
    for step in range(steps):
        loss = model(torch.randn(32, 75, generator=seeded) * sizes)
        with optimizer.gradients.adding():
            loss.backward()
        optimizer.update(step, float(optimizer.gradient_norm()))
        losses.append(loss.item())
    return losses, optimizer, model


def test_eight_bit_moments_converge_as_float32_ones() -> None:
    plain, _, exact = train(300)
    narrow, optimizer, model = train(300, optimizer=OptimizerName.adamw8bit)
    assert plain[-1] < 0.02 * plain[0] and narrow[-1] < 0.02 * narrow[0]
    assert sum(narrow) == pytest.approx(sum(plain), rel=0.05)
    distance = (model.weight - exact.weight).norm() / (exact.weight - Regression().weight).norm()
    assert distance < 0.25
    kept = optimizer.state()
    assert model.weight.numel() >= SMALL and kept["weight.exp_avg_8bit"].dtype == torch.int8
    assert kept["weight.exp_avg_sq_8bit"].dtype == torch.uint8 and kept["bias.exp_avg"].dtype == torch.float32
    matrix = sum(t.numel() * t.element_size() for name, t in kept.items() if name.startswith("weight."))
    assert matrix < 2.2 * model.weight.numel()
    assert all(optimizer.expected(name) == tensor.shape for name, tensor in kept.items())
    assert optimizer.expected("weight.exp_avg") is None and optimizer.expected("bias.exp_avg_8bit") is None


def test_codes_keep_size_and_sign() -> None:
    numbers = torch.randn(9, BLOCK, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 0, BLOCK)
    numbers[3] = 0.0
    found = signed_numbers(*signed_codes(numbers))
    scale = numbers.abs().amax(1, keepdim=True)
    assert ((found - numbers).abs() <= 0.012 * scale).all() and (found[3] == 0).all()
    assert (found.sign() * numbers.sign() >= 0).all()
    squares = numbers.square()
    for shift in (-0.5, 0.0, 0.49):
        found = unsigned_numbers(*unsigned_codes(squares, shift))
        assert ((found - squares).abs() <= 0.02 * scale.square()).all()
        assert ((found > 0) == (squares > 0)).all(), "a second moment that becomes 0 would make a step without bound"
    low, high = (unsigned_numbers(*unsigned_codes(squares, shift)).sum() for shift in (-0.5, 0.49))
    assert low < squares.sum() < high


def test_an_offloaded_optimizer_takes_the_same_steps() -> None:
    plain, _, one = train(20)
    offloaded, optimizer, two = train(20, offload=Offload.optimizer)
    assert plain == offloaded and torch.equal(one.weight, two.weight)
    assert {tensor.device.type for tensor in optimizer.state().values()} == {"cpu"}


def test_the_norm_of_narrow_gradients_has_all_its_digits() -> None:
    seeded = torch.Generator().manual_seed(3)
    gradients = {str(n): torch.randn(50, 7, generator=seeded).bfloat16() for n in range(5)}
    gradients["wide"] = torch.randn(9, generator=seeded)
    expected = torch.cat([g.double().flatten() for g in gradients.values()]).norm().item()
    assert total_norm(gradients, torch.device("cpu")).item() == pytest.approx(expected, rel=1e-6)
    assert total_norm({}, torch.device("cpu")).item() == 0.0


@pytest.mark.parametrize("narrow", [False, True])
def test_steps_are_those_of_torch_to_the_bit_and_skip_what_has_no_gradient(narrow: bool) -> None:
    noise = torch.Generator().manual_seed(0)
    start = {name: torch.randn(shape, generator=noise) for name, shape in {"a": (4, 3), "b": (5,), "c": (2, 2)}.items()}
    dtype = torch.bfloat16 if narrow else torch.float32
    own = {name: nn.Parameter(tensor.to(dtype, copy=True)) for name, tensor in start.items()}
    config = LearnerConfig(lr=0.1, weight_decay=0.1, grad_clip=1e9)
    optimizer = Optimizer(own.items(), config, lr=0.1, updates=9, wide=start)
    theirs = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    groups = [
        {"params": [theirs["a"], theirs["c"]], "weight_decay": 0.1},
        {"params": [theirs["b"]], "weight_decay": 0.0},
    ]
    peer = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, config.beta2), fused=True)
    for step, used in enumerate(("ab", "abc", "abc", "c", "abc")):
        peer.zero_grad()
        for name in used:
            gradient = torch.randn(start[name].shape, generator=noise).to(dtype)
            own[name].grad, theirs[name].grad = gradient, gradient.float()
        optimizer.update(step, float(optimizer.gradient_norm()) if step % 2 else 0.0)
        peer.step()
        for name, master in optimizer.masters.items():
            assert torch.equal(master, theirs[name]) and torch.equal(own[name], theirs[name].to(dtype)), (step, name)
            assert master.grad is None
    assert [int(optimizer.state()[f"{name}.step"]) for name in "abc"] == [4, 4, 4]
