"""Launches of Triton kernels, without the work that Triton does again for each: what was compiled is found by a key.

Triton looks at every argument of every launch, which takes longer than a small kernel runs. The key here holds all that
Triton compiles for: devices, number formats, addresses and counts that 16 divides, counts of one, and constants.
"""

from functools import reduce
from operator import attrgetter, or_

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

WIDE = 2**31
"""Integers from here on are passed in 64 bits."""


class Launcher:
    """A kernel whose parameters are tensors, then numbers, then constants; a one-dimensional grid of `programs`."""

    def __init__(self, kernel):
        self._kernel = kernel
        # The interpreter has nothing compiled; on AMD's GPUs the sizes of tensors matter too.
        self._direct = isinstance(kernel, JITFunction) and torch.version.hip is None
        self._compiled = {}

    def __call__(
        self, programs: int, tensors: tuple[Tensor, ...], numbers: tuple[int | float, ...], constants: tuple, **options
    ) -> None:
        """Triton's own launch the first time and where somebody watches launches, and the same without detours then."""
        if not self._direct or _watched():
            self._kernel[(programs,)](*tensors, *numbers, *constants, **options)
            return
        pointers = [*map(Tensor.data_ptr, tensors)]
        active = driver.active
        device = active.get_current_device()
        even = reduce(or_, pointers) % 16 == 0 or tuple([pointer % 16 == 0 for pointer in pointers])
        key = (
            device, constants, even, *options.values(), *map(_dtype, tensors), *map(Tensor.get_device, tensors),
            *map(_kind, numbers),
        )  # fmt: skip
        cached = self._compiled.get(key)
        if cached is None:
            compiled = self._kernel[(programs,)](*tensors, *numbers, *constants, **options)
            if isinstance(compiled, CompiledKernel):
                self._compiled[key] = compiled.run, compiled.function, compiled.packed_metadata
            return
        run, function, metadata = cached
        stream = active.get_current_stream(device)
        run(programs, 1, 1, stream, function, metadata, None, None, None, *pointers, *numbers, *constants)


_dtype = attrgetter("dtype")


def _kind(number):
    """What of a number decides how it is compiled."""
    return -1 if type(number) is float else (number == 1) + 2 * (number % 16 == 0) + 4 * (not -WIDE <= number < WIDE)


def _watched():
    """Whether a profiler has asked to be told of launches."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
