"""The ways of a kernel: plain torch, Triton on a GPU, and where there is none Triton's interpreter on the CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec

import pytest
import torch

from turnwise.engines.kernels.dispatch import interpreted

CUDA = torch.cuda.is_available()
ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a GPU")])
INTERPRETED = pytest.param("interpreted", marks=pytest.mark.skipif(CUDA, reason="the GPU itself is asked"))


def _count_with_arrays_of_one() -> None:
    """Triton's interpreter counts loops with arrays of one number, which numpy takes for a number only before 2.4."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _multiply_row_by_row() -> None:
    """Triton's interpreter has numpy multiply, whose bits of a row depend on the rows beside it on some CPUs.

    On a GPU they do not, and tests of that hold here on any CPU: products are added up in one order.
    """
    from triton.runtime import interpreter

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        left, right = (one.data.astype(d.data.dtype) for one in (a, b))
        product = d.data.copy()
        for k in range(left.shape[-1]):
            product += left[..., :, k, None] * right[..., k, None, :]
        return interpreter.TensorHandle(product, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


if not CUDA:  # must be said before triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton"):
        _count_with_arrays_of_one()
        _multiply_row_by_row()


@contextmanager
def _taking(way: str) -> Iterator[str]:
    if way == "interpreted":
        pytest.importorskip("triton")
    with interpreted() if way == "interpreted" else nullcontext():
        yield "cuda" if way == "cuda" else "cpu"


@pytest.fixture(params=["plain", ON_GPU, INTERPRETED])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the tensors of a test lie, by each way."""
    with _taking(request.param) as place:
        yield place


@pytest.fixture(params=[ON_GPU, INTERPRETED])
def triton_device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The same, by Triton only."""
    with _taking(request.param) as place:
        yield place


@pytest.fixture(params=["plain", ON_GPU])
def fast_device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The same, for what would take the interpreter too long."""
    with _taking(request.param) as place:
        yield place
