"""Where the states of recurrent layers lie on a device: a row for each slot, and rows for what is kept.

Numbers only; the tensors lie on the device. Kept are the states of conversations between turns and those at the end of
what prompts share. All changes are moves from row to row, told to the device before its next launch.
"""

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Moves = NDArray[np.int64]
"""[2, n]: from which rows to which; none is written twice, and none is read after it was written."""


class StateRows:
    """Rows 0 to `slots` are the slots', then `kept` rows, then one of zeros and one that padding writes to."""

    def __init__(self, slots: int, kept: int) -> None:
        self.zeros, self.padding, self.rows = slots + kept, slots + kept + 1, slots + kept + 2
        self._free = list(range(slots + kept - 1, slots - 1, -1))
        self._kept: OrderedDict[str | bytes, int] = OrderedDict()
        """By conversation, or by the digest of a prompt's beginning; the longest unused first."""
        self._moves: list[tuple[int, int]] = []

    def has(self, key: str | bytes) -> bool:
        """Whether states are kept under this name."""
        return key in self._kept

    def begin(self, slot: int) -> None:
        """A sequence begins in a slot."""
        self._moves.append((self.zeros, slot))

    def resume(self, conversation: str, slot: int) -> None:
        """A conversation goes on in a slot."""
        row = self._kept.pop(conversation)
        self._moves.append((row, slot))
        self._free.append(row)

    def fork(self, digest: bytes, slot: int) -> None:
        """A sequence begins in a slot as another did."""
        self._kept.move_to_end(digest)
        self._moves.append((self._kept[digest], slot))

    def keep(self, key: str | bytes, slot: int) -> None:
        """Keep the states of a slot, for which others may have to go."""
        if key in self._kept:
            row = self._kept.pop(key)
        elif self._free:
            row = self._free.pop()
        else:
            _, row = self._kept.popitem(last=False)
        self._kept[key] = row
        self._moves.append((slot, row))

    def drop(self, key: str | bytes) -> None:
        """Forget what is kept under this name; unknown names are fine."""
        if (row := self._kept.pop(key, None)) is not None:
            self._free.append(row)

    def forget(self) -> None:
        """Forget everything: it is no longer true."""
        for key in list(self._kept):
            self.drop(key)
        self._moves.clear()

    def take_moves(self) -> Iterator[Moves]:
        """The moves since this was last asked, in the order in which they are to be made."""
        moves, self._moves = self._moves, []
        together: dict[int, int] = {}
        """By target."""
        for source, target in moves:
            if source in together or target in together:
                yield np.array([[*together.values()], [*together]], dtype=np.int64)
                together = {}
            together[target] = source
        if together:
            yield np.array([[*together.values()], [*together]], dtype=np.int64)
