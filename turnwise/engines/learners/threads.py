"""Number of threads and GPU of a learner's work: torch keeps both for each thread that computes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def computing(threads: int, device: torch.device) -> Iterator[None]:
    """Set both for the thread that enters; `computing(1, device)(work)` is the work that enters first."""
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    yield
