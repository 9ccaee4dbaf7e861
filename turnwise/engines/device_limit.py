"""Holds a process to its share of a GPU: what NVML shows of it stays within `engine.memory_fraction`."""

from typing import TYPE_CHECKING

from turnwise.engines.memory_plan import OVERHEAD

if TYPE_CHECKING:
    import torch

LEAST_OUTSIDE = 3 * OVERHEAD // 8
"""CUDA's context, the code of kernels and the graphs themselves, which lie outside of PyTorch's allocator. Some come
later than the first look at a device, so no less is left for them."""


def hold_to(device: "torch.device", allowed: int | float) -> None:
    """Have this process take no more than so many bytes of a GPU (`MemoryPlan.share`), or such a fraction of it, CUDA's
    own included.

    PyTorch's allocator then gives its unused blocks back before it takes more, and raises torch.OutOfMemoryError where
    that is not enough: a pass is split, a cache made smaller. The pools of CUDA graphs count, and expandable segments.
    """
    import torch

    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    most = allowed if isinstance(allowed, int) else int(allowed * total)
    inside = allocator_share(most, total - free - torch.cuda.memory_reserved(device))
    torch.cuda.set_per_process_memory_fraction(min(1.0, inside / total), device)


def allocator_share(allowed: int, outside: int) -> int:
    """What PyTorch's allocator may reserve, where so many bytes are held outside of it now. More than a context takes
    is somebody else's."""
    return max(0, allowed - min(OVERHEAD, max(LEAST_OUTSIDE, outside)))
