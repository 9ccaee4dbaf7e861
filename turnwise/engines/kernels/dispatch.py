"""Whether an operation takes the Triton way: on CUDA always, on the CPU where a test runs Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_interpreting: ContextVar[bool] = ContextVar("interpreting", default=False)


def use_triton(x: Tensor) -> bool:
    """True for tensors on a GPU, and for all within `interpreted()`."""
    return x.is_cuda or _interpreting.get()


@contextmanager
def interpreted() -> Iterator[None]:
    """Send CPU tensors through Triton; needs TRITON_INTERPRET=1 from before triton was imported."""
    token = _interpreting.set(True)
    try:
        yield
    finally:
        _interpreting.reset(token)
