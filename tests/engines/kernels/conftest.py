"""Kernels are tried by Triton's interpreter where there is no GPU, which must be said before triton is imported."""

import os
from importlib.util import find_spec

import torch


def _count_with_arrays_of_one() -> None:
    """Triton's interpreter counts loops with arrays of one number, which numpy takes for a number only before 2.4."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton"):
        _count_with_arrays_of_one()
