"""Elementwise steps taken so that torch cuts no row between two threads: a row's bits are the same in any company.

torch hands an elementwise step of more than `CUT` numbers to several threads and cuts it at any number, within a row
too. Each share ends in a scalar tail behind its vectors, and `exp` rounds otherwise in the two: a number beside a cut
has other bits than the same number elsewhere. Steps without a transcendental round alike in both.
"""

from collections.abc import Callable

import torch
from torch import Tensor

CUT = 1 << 15
"""torch cuts no elementwise step of this many numbers or fewer (`at::internal::GRAIN_SIZE`)."""


def in_whole_rows(step: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`step` of every number of x [T, N] by blocks of rows that are not cut; the same bits whatever the thread count.

    Rows that lie apart, as those of a slice of a wider matrix do, have vectors and tails of their own and so the same
    bits alone; rows without a gap have those of their block. A row longer than a block is taken alone and in pieces.
    """
    if x.device.type != "cpu" or x.numel() <= CUT:
        return step(x)
    rows, result = max(1, CUT // x.shape[1]), torch.empty(x.shape, dtype=x.dtype)
    for start in range(0, len(x), rows):
        for left in range(0, x.shape[1], CUT):
            piece = (slice(start, start + rows), slice(left, left + CUT))
            result[piece] = step(x[piece])
    return result
