"""Training sequences drawn as strings: `p` prompt, `a` policy, `t` tool, `u` user, one letter a token."""

import itertools
from typing import Any

import pytest

from turnwise.training.sequences import TrainSequence

GARBAGE = 1e6
"""Stands at every token the policy did not write: whoever reads it is found out."""


def draw(spans: str, *, reward: float = 0.0, group: int = 0, trajectory: int = 0, **arrays: Any) -> TrainSequence:
    """`draw("ppaata", values=[1, 2, 3])`: arrays are given at the policy's tokens, garbage stands elsewhere."""
    mask = [letter == "a" for letter in spans]
    turns, turn = [], 0
    for before, letter in itertools.pairwise(" " + spans):
        turn += before not in " pa" and letter == "a"
        turns.append(turn)
    ids = [3 + (7 * at + 5 * trajectory) % 13 for at in range(len(spans))]
    made = TrainSequence(ids, mask, [0.0] * len(spans), turns, 0, trajectory, group, reward)
    for name, values in arrays.items():
        row = iter(values)
        assert len(values) == sum(mask)
        setattr(made, name, [float(next(row)) if flag else GARBAGE for flag in mask])
    return made


@pytest.fixture(name="draw")
def _draw():
    return draw
