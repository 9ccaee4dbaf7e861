"""Which way an operation takes: Triton's for tensors on a GPU, plain torch's for all others."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from turnwise.errors import EngineError

_interpreted = ContextVar("interpreted", default=False)


def use_triton(x: Tensor) -> bool:
    """Whether an operation on `x` is Triton's to do."""
    return x.is_cuda or _interpreted.get()


@contextmanager
def interpreted() -> Iterator[None]:
    """Within it tensors on the CPU take the Triton way too, by Triton's interpreter: for tests of the kernels."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise EngineError("Triton's interpreter wants TRITON_INTERPRET=1 set before triton is imported")
    before = _interpreted.set(True)
    try:
        yield
    finally:
        _interpreted.reset(before)
