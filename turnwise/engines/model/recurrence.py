"""Layers that carry a state from token to token: which tokens of a pass are one sequence, and where states are kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from turnwise.engines.model.policy_model import StateShape

States = tuple[Tensor, ...]
"""What one layer keeps of its sequences, [rows, ...] each."""


@dataclass(frozen=True)
class Recurrence:
    """The sequences of one pass: `Recurrence((3, 2))` is five tokens of two sequences that begin here.

    Rows behind them are padding. Where `states` are given, each sequence goes on from those in its row, which are
    then the states behind its last token; a row of zeros is a sequence that begins.
    """

    lengths: tuple[int, ...]
    states: Sequence[States] | None = None
    """By layer, in the order of their numbers."""
    rows: Tensor | None = None
    """[sequences] int64, all different but for padding; None: the first ones, in order."""

    @cached_property
    def rectangles(self) -> list["Rectangle"]:
        """The sequences by length: a layer computes those of one length side by side, which keeps them apart."""
        by_length: dict[int, list[int]] = {}
        for number, length in enumerate(self.lengths):
            by_length.setdefault(length, []).append(number)
        if len(by_length) == 1:
            (width,) = by_length
            return [Rectangle(len(self.lengths), width, None, None)]
        starts = torch.tensor((0, *self.lengths)).cumsum(0)
        made = []
        for width, numbers in by_length.items():
            chosen = torch.tensor(numbers)
            tokens = (starts[chosen].unsqueeze(1) + torch.arange(width)).view(-1)
            made.append(Rectangle(len(numbers), width, tokens, chosen))
        return made

    def put_together(self, parts: Sequence[Tensor], total: int) -> Tensor:
        """[total, ...] of what was computed of each rectangle, zeros for padding."""
        if len(parts) == 1 and len(parts[0]) == total:
            return parts[0]
        joined = torch.cat([*parts, parts[0].new_zeros(total - sum(self.lengths), *parts[0].shape[1:])])
        return joined if len(parts) == 1 else joined.index_select(0, self._home(total).to(joined.device))

    def _home(self, total: int) -> Tensor:
        """Where each token lies in the rectangles laid end to end."""
        tokens = torch.cat([rectangle.tokens for rectangle in self.rectangles if rectangle.tokens is not None])
        home = torch.arange(total)
        home[tokens] = torch.arange(len(tokens))
        return home


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Sequences of one length: how many, how long, which tokens and which sequences; None means all, in order."""

    count: int
    width: int
    tokens: Tensor | None
    sequences: Tensor | None

    def of(self, x: Tensor) -> Tensor:
        """Its tokens [count, width, ...] of x [T, ...]."""
        if self.tokens is None:
            return x[: self.count * self.width].view(self.count, self.width, *x.shape[1:])
        return x.index_select(0, self.tokens.to(x.device)).view(self.count, self.width, *x.shape[1:])

    def taken(self, recurrence: Recurrence, states: States) -> States:
        """The states of its sequences: the live ones where they are the first rows, else copies for `give_back`."""
        rows = self._rows(recurrence)
        if rows is None:
            return tuple(state[: self.count] for state in states)
        return tuple(state.index_select(0, rows.to(state.device)) for state in states)

    def give_back(self, recurrence: Recurrence, states: States, taken: States) -> None:
        """Keep the states behind its last tokens."""
        rows = self._rows(recurrence)
        if rows is not None:
            for state, new in zip(states, taken, strict=True):
                state.index_copy_(0, rows.to(state.device), new)

    def _rows(self, recurrence: Recurrence) -> Tensor | None:
        if recurrence.rows is None or self.sequences is None:
            return recurrence.rows if self.sequences is None else self.sequences
        return recurrence.rows.index_select(0, self.sequences.to(recurrence.rows.device))


def empty_states(shapes: Sequence[StateShape], rows: int, device: torch.device | None) -> list[States]:
    """Those of so many sequences that have not begun."""
    return [
        tuple(
            torch.zeros(rows, *shape, dtype=dtype, device=device)
            for shape, dtype in zip(each.shapes, each.dtypes, strict=True)
        )
        for each in shapes
    ]
