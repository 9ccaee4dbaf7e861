"""A user's own advantage or loss, `module:function` or `file.py:function`: its contract, and a try-out at the start.

An advantage is `def advantage(batch: AdvantageBatch) -> numpy array`; a loss is `def loss(batch: LossBatch) -> Tensor`.
Both are plain functions of arrays, named in `algorithm.advantage` and `algorithm.loss`; see docs/training.md.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from turnwise.engines.learners.custom_loss import LossBatch
from turnwise.errors import PluginError, one_line
from turnwise.system.plugins import call_with, load_function

__all__ = ["AdvantageBatch", "LossBatch", "advantages", "try_advantage"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AdvantageBatch:
    """What an advantage is computed from: E episodes of a step, whose policy wrote N tokens in all.

    The function returns E numbers, each for all tokens of its episode, or N, one for each token, episode by episode.
    Two groups of two episodes: `rewards == [1, 0, 0, 0]`, `groups == [0, 0, 1, 1]`, `lengths == [12, 9, 15, 7]`.
    """

    rewards: Floats
    """(E) Rewards, less the KL penalty where there is one."""
    groups: Ints
    """(E) Episodes with the same number are siblings: rollouts of one sample."""
    lengths: Ints
    """(E) Policy tokens of each episode; they add up to N."""
    turns: Ints
    """(N) The assistant turn that each token belongs to, from 0 in every episode; those of branches come last."""


def advantages(name: str, batch: AdvantageBatch) -> Floats:
    """What the user's function makes of a step, checked and one for each token."""
    where = f"advantage {name!r}"
    result = call_with(load_function(name, "advantage"), batch, where)
    try:
        values = np.asarray(result, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise PluginError(f"{where} returned {type(result).__name__}, not numbers: {one_line(error)}") from error
    episodes, tokens = len(batch.rewards), int(batch.lengths.sum())
    if values.shape not in ((episodes,), (tokens,)):
        raise PluginError(
            f"{where} returned an array of shape {values.shape} for {episodes} episodes with {tokens} tokens: return "
            f"({episodes},) or ({tokens},)"
        )
    if not np.isfinite(values).all():
        raise PluginError(f"{where} returned {values[~np.isfinite(values)][0]} for one of {episodes} episodes")
    return values if values.shape == (tokens,) else np.repeat(values, batch.lengths)


def try_advantage(name: str) -> None:
    """Two groups that differ in reward, one that does not, and an episode that is alone in its group."""
    lengths = np.array([2, 1, 3, 1, 2, 1, 4])
    batch = AdvantageBatch(
        rewards=np.array([1.0, 0.0, 0.5, -1.0, 1.0, 1.0, 0.0]),
        groups=np.array([0, 0, 1, 1, 2, 2, 3]),
        lengths=lengths,
        turns=np.concatenate([np.arange(length) for length in lengths]),
    )
    advantages(name, batch)
