"""Training sequences drawn as strings: `p` prompt, `a` policy, `t` tool, `u` user, one letter a token."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from turnwise.engines.learners.device_batch import DeviceBatch, on_device
from turnwise.training.packing import fill, pack, tokens_by_trajectory
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
        assert len(values) == sum(mask)
        row = np.full(len(mask), GARBAGE)
        row[mask] = values
        setattr(made, name, row)
    return made


def micro_batches(sequences: list[TrainSequence], token_budget: int, *, together: bool = False) -> list[DeviceBatch]:
    """One minibatch packed within the budget, as an update does it."""
    whole = tokens_by_trajectory(sequences)
    return [
        on_device(pack(part, whole), torch.device("cpu")) for part in fill(sequences, token_budget, together=together)
    ]


@pytest.fixture(name="draw")
def _draw():
    return draw


@pytest.fixture(name="micro_batches")
def _micro_batches():
    return micro_batches
