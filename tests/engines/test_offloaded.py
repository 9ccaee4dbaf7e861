"""Steps in pieces, through small buffers, are those of an optimizer that lies beside its weights, to the last bit."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from turnwise.config import LearnerConfig
from turnwise.config.choices import Offload, OptimizerName
from turnwise.engines.host_memory import buffers_bytes, optimizer_bytes
from turnwise.engines.learners.offloaded import UNIT, OffloadedSteps, Piece, cut
from turnwise.engines.learners.optimizer import Optimizer
from turnwise.engines.memory_plan import BUFFER_BYTES, buffer_bytes

SHAPES = {"matrix": (67, 75), "bias": (257,), "large": (90, 61), "tiny": (3,), "last": (129, 40)}
CPU = torch.device("cpu")


def weights(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=noise).to(dtype) for name, shape in SHAPES.items()}


def optimizer_of(dtype: torch.dtype, offload: Offload, kind: OptimizerName, numbers: int | None = None) -> Optimizer:
    """Of the weights above; offloaded with buffers of so many numbers."""
    config = LearnerConfig(lr=0.05, weight_decay=0.1, grad_clip=5.0, offload=offload, optimizer=kind)
    parameters = {name: nn.Parameter(tensor) for name, tensor in weights(0, dtype).items()}
    made = Optimizer(parameters.items(), config, lr=0.05, updates=9, wide=weights(0, torch.float32))
    if numbers is not None:
        made._elsewhere = OffloadedSteps(made.parameters, made.masters, made._parts, CPU, 4 * numbers)
    return made


def take_steps(optimizer: Optimizer, dtype: torch.dtype, first: int, count: int) -> Iterator[None]:
    """Noise for gradients, some of which are missing; the second pass of a step is added to the first."""
    for step in range(first, first + count):
        for seed in (1, 2)[: 1 + step % 2]:
            with optimizer.gradients.adding():
                for name, gradient in weights(10 * step + seed, dtype).items():
                    if (step, name) not in ((1, "matrix"), (2, "tiny")):
                        optimizer.parameters[name].grad = gradient
        optimizer.update(step, float(optimizer.gradient_norm()))
        yield


@pytest.mark.parametrize("kind", list(OptimizerName))
@pytest.mark.parametrize(
    ("dtype", "numbers"), [(torch.bfloat16, None), (torch.bfloat16, 4 * UNIT), (torch.float32, UNIT)]
)
def test_steps_in_pieces_are_the_whole_ones_to_the_bit(
    kind: OptimizerName, dtype: torch.dtype, numbers: int | None
) -> None:
    plain = optimizer_of(dtype, Offload.none, kind)
    pieces = optimizer_of(dtype, Offload.optimizer, kind, numbers)
    assert plain._elsewhere is None and pieces._elsewhere is not None
    for _ in zip(take_steps(plain, dtype, 0, 5), take_steps(pieces, dtype, 0, 5), strict=True):
        one, two = plain.state(), pieces.state()
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
        for name, parameter in plain.parameters.items():
            assert torch.equal(parameter, pieces.parameters[name]), name
            assert torch.equal(plain.masters[name], pieces.masters[name]), name
    assert int(pieces.state()["matrix.step"]) == 4 and not pieces.gradients.waiting


def test_a_loaded_state_goes_on_in_pieces() -> None:
    one, two = (optimizer_of(torch.bfloat16, Offload.optimizer, OptimizerName.adamw, n) for n in (UNIT, 4 * UNIT))
    list(take_steps(one, torch.bfloat16, 0, 3))
    saved = {name: tensor.clone() for name, tensor in one.state().items()}
    two.load({name: master.detach().clone() for name, master in one.masters.items()}, saved)
    assert all(torch.equal(p, two.parameters[name]) for name, p in one.parameters.items())
    for optimizer in (one, two):
        list(take_steps(optimizer, torch.bfloat16, 3, 1))
    assert all(torch.equal(p, two.parameters[name]) for name, p in one.parameters.items())


def test_tensors_are_cut_into_whole_units_that_cover_them() -> None:
    sizes = {"a": 3 * UNIT + 5, "b": 1, "c": 2 * UNIT, "empty": 0, "d": 7}
    loads = list(cut(sizes, 2 * UNIT))
    pieces = [piece for load in loads for piece in load]
    for name, size in sizes.items():
        own = [piece for piece in pieces if piece.name == name]
        assert [n for p in own for n in range(p.start, p.stop)] == list(range(size))
        assert [p.ends for p in own] == [False] * (len(own) - 1) + [True] * bool(own)
    assert all(piece.start % UNIT == piece.place % UNIT == 0 for piece in pieces)
    for load in loads:
        ends = [0, *(piece.place + piece.stop - piece.start for piece in load)]
        assert all(piece.place >= end for piece, end in zip(load, ends, strict=False)) and ends[-1] <= 2 * UNIT
    assert loads[0] == [Piece("a", 0, 2 * UNIT, 0, ends=False)]


def test_buffers_are_powers_of_two_and_bounded() -> None:
    assert [buffer_bytes(n) for n in (1, 1024, 1025, 7_615_616_512)] == [1024, 1024, 2048, BUFFER_BYTES]


PEAK = """
import sys
import torch
from torch import nn
from turnwise.config import LearnerConfig
from turnwise.config.choices import Offload, OptimizerName
from turnwise.engines.learners.optimizer import Optimizer

def peak():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

def run(numbers):
    config = LearnerConfig(offload=Offload.optimizer, optimizer=OptimizerName(sys.argv[2]))
    parameters = {str(n): nn.Parameter(torch.ones(numbers // 4, dtype=torch.bfloat16)) for n in range(4)}
    optimizer = Optimizer(parameters.items(), config, lr=1e-3, updates=9)
    for step in range(2):
        with optimizer.gradients.adding():
            for parameter in parameters.values():
                parameter.grad = torch.ones_like(parameter)
        optimizer.update(step, 2.0)

run(1 << 15)
before = peak()
run(int(sys.argv[1]))
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is there on Linux only")
@pytest.mark.parametrize("kind", list(OptimizerName))
def test_a_step_takes_the_memory_that_the_plan_counts(kind: OptimizerName) -> None:
    """Weights and gradients of two bytes each lie here too, which are on the GPU where there is one."""
    numbers = 1 << 24
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}  # what is freed goes, as that of large models does
    command = [sys.executable, "-c", PEAK, str(numbers), kind.value]
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr
    planned = optimizer_bytes(kind, numbers) + buffers_bytes(kind, numbers)
    widened = buffer_bytes(numbers)  # one more, on the GPU where there is one
    assert int(found.stdout) - 4 * numbers - widened == pytest.approx(planned, rel=0.1)
