"""A user's own advantage or loss, `module:function` or `file.py:function`: its contract, and a try-out at the start.

An advantage is `def advantage(batch: AdvantageBatch) -> numpy array`; a loss is `def loss(batch: LossBatch) -> Tensor`.
Both are plain functions of arrays, named in `algorithm.advantage` and `algorithm.loss`; see docs/training.md.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from turnwise.choices import Advantage, PolicyLoss
from turnwise.config import AlgorithmConfig
from turnwise.errors import ConfigError, PluginError, TurnwiseError, one_line, unknown
from turnwise.knobs import is_plugin
from turnwise.plugins import load

if TYPE_CHECKING:
    from torch import Tensor

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
    """(N) The assistant turn that each token belongs to, from 0 in every episode."""


@dataclass(frozen=True, slots=True)
class LossBatch:
    """What a policy loss is computed from: N policy tokens, of all segments of their episodes.

    The function returns N losses that are differentiable by `logprobs`. `algorithm.aggregation` makes one number of
    them, importance weights, entropy bonus and KL loss come on top.
    """

    logprobs: "Tensor"
    """(N) The learner's log-probs now, with gradient."""
    old_logprobs: "Tensor"
    """(N) From before the step's first update (`algorithm.old_logprobs`)."""
    advantages: "Tensor"
    """(N)"""
    episodes: "Tensor"
    """(N) Tokens with the same number are of one episode."""


def check_choices(algorithm: AlgorithmConfig) -> None:
    """Refuse a name nobody offers, and a function that does not keep its contract on a tiny batch."""
    for key, name, offered, try_out in (
        ("advantage", algorithm.advantage, Advantage, _try_advantage),
        ("loss", algorithm.loss, PolicyLoss, _try_loss),
    ):
        if is_plugin(name):
            try_out(name)
        elif name not in list(offered):
            hint = unknown("choice", name, [choice.value for choice in offered])
            raise ConfigError(f"algorithm.{key}: {hint} Your own is written as module:function.")


def advantages(name: str, batch: AdvantageBatch) -> Floats:
    """What the user's function makes of a step, checked and one for each token."""
    where = f"advantage {name!r}"
    result = _call(_load(name, "advantage"), batch, where)
    try:
        found = np.asarray(result, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise PluginError(f"{where} returned {type(result).__name__}, not numbers: {one_line(error)}") from error
    episodes, tokens = len(batch.rewards), int(batch.lengths.sum())
    if found.shape not in ((episodes,), (tokens,)):
        raise PluginError(
            f"{where} returned an array of shape {found.shape} for {episodes} episodes with {tokens} tokens: return "
            f"({episodes},) or ({tokens},)"
        )
    if not np.isfinite(found).all():
        raise PluginError(f"{where} returned {found[~np.isfinite(found)][0]} for one of {episodes} episodes")
    return found if found.shape == (tokens,) else np.repeat(found, batch.lengths)


def losses(name: str, batch: LossBatch) -> "Tensor":
    """What the user's function makes of a batch: one finite loss for each token, with a gradient."""
    import torch

    where = f"loss {name!r}"
    found = _call(_load(name, "loss"), batch, where)
    if not isinstance(found, torch.Tensor):
        raise PluginError(f"{where} returned {type(found).__name__}, not a tensor")
    if found.shape != batch.logprobs.shape:
        shape, wanted = tuple(found.shape), tuple(batch.logprobs.shape)
        raise PluginError(f"{where} returned a tensor of shape {shape} for {wanted[0]} tokens: return {wanted}")
    if not torch.isfinite(found).all():
        raise PluginError(f"{where} returned a loss that is not finite for one of {len(found)} tokens")
    if not found.requires_grad:
        raise PluginError(f"{where} returned losses without a gradient: they do not depend on batch.logprobs")
    return found


def _load(name: str, kind: str) -> Callable[[Any], Any]:
    found = load(name, kind)
    if not callable(found) or isinstance(found, type):
        raise PluginError(f"{kind} {name!r} must be a function, not {type(found).__name__}")
    if inspect.iscoroutinefunction(found):
        raise PluginError(f"{kind} {name!r} must be a plain function, not an async one")
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        raise PluginError(f"{kind} {name!r} must take the batch and nothing else: {error}") from error
    checked: Callable[[Any], Any] = found
    return checked


def _call(function: Callable[[Any], Any], batch: AdvantageBatch | LossBatch, where: str) -> Any:
    try:
        return function(batch)
    except TurnwiseError:
        raise
    except Exception as error:  # a user's code: its author reads the message
        raise PluginError(f"{where} raised {one_line(error)}") from error


def _try_advantage(name: str) -> None:
    """Two groups that differ in reward, one that does not, and an episode that is alone in its group."""
    lengths = np.array([2, 1, 3, 1, 2, 1, 4])
    batch = AdvantageBatch(
        rewards=np.array([1.0, 0.0, 0.5, -1.0, 1.0, 1.0, 0.0]),
        groups=np.array([0, 0, 1, 1, 2, 2, 3]),
        lengths=lengths,
        turns=np.concatenate([np.arange(length) for length in lengths]),
    )
    advantages(name, batch)


def _try_loss(name: str) -> None:
    """Five tokens of two episodes: ratios above and below 1, advantages of both signs and 0."""
    import torch

    logprobs = torch.tensor([-0.1, -2.0, -0.7, -1.0, -0.4], requires_grad=True)
    batch = LossBatch(
        logprobs=logprobs,
        old_logprobs=torch.tensor([-0.3, -1.0, -0.7, -1.5, -0.4]),
        advantages=torch.tensor([1.0, 1.0, 1.0, -0.5, 0.0]),
        episodes=torch.tensor([0, 0, 0, 1, 1]),
    )
    losses(name, batch).sum().backward()  # type: ignore[no-untyped-call]
    if logprobs.grad is None or not torch.isfinite(logprobs.grad).all():
        raise PluginError(f"loss {name!r} has a gradient that is not finite")
    if not logprobs.grad.any():
        raise PluginError(f"loss {name!r} has the gradient 0 for advantages that are not")
