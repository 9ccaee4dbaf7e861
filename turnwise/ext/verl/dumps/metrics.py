"""The numbers of an imported step: only those that the dump has the facts for."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.types import Ledger, Trajectory

LARGEST_LOG_RATIO = 20.0
"""Beyond this the estimate says nothing but "far away"; verl cuts there too."""


def step_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """A training step's numbers by verl's names."""
    metrics = {"trajectories/total": float(len(trajectories))}
    metrics |= _three("critic/score", (t.reward for t in trajectories if t.reward is not None))
    recorded = [t for t in trajectories if t.segments]
    metrics |= _three("response_length", (sum(len(s) for s in t.segments) for t in recorded))
    metrics |= _three("num_turns", (len(t.turns) for t in trajectories))
    metrics |= _three("tool_call_counts", (len(t.calls) for t in trajectories))
    metrics |= {f"train/{name}": value for name, value in _accuracy(trajectories).items()}
    metrics |= _parts(trajectories)
    metrics |= _three("critic/rewards", _sums(recorded, "rewards"))
    metrics |= _three("critic/values", _policy_values(recorded, "values"))
    kl = np.concatenate([np.empty(0), *(_k3(ledger) for t in recorded for ledger in t.segments)])
    if len(kl):
        metrics["actor/kl_loss"] = float(kl.mean())
    for name in ("ref_reward", "valid_reward"):
        values = [t.sample.info[name] for t in trajectories if isinstance(t.sample.info.get(name), int | float)]
        metrics |= _three(f"critic/{name}", values)
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def eval_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """An evaluation's numbers, on a line of their own."""
    metrics = _three("val/score", (t.reward for t in trajectories if t.reward is not None))
    return metrics | {f"val/{name}": value for name, value in _accuracy(trajectories).items()}


def _three(name: str, values: Iterable[float]) -> dict[str, float]:
    finite = [float(value) for value in values if math.isfinite(value)]
    if not finite:
        return {}
    return {f"{name}/mean": sum(finite) / len(finite), f"{name}/max": max(finite), f"{name}/min": min(finite)}


def _accuracy(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """The share of right answers, where the dump says which are (a key `acc`)."""
    by_source: dict[str, list[bool]] = defaultdict(list)
    for trajectory in trajectories:
        if "acc" in trajectory.parts:
            by_source[trajectory.sample.data_source].append(trajectory.parts["acc"] >= 1.0)
    shares = {f"accuracy/{source}": sum(right) / len(right) for source, right in by_source.items()}
    every = [right for rights in by_source.values() for right in rights]
    return shares | ({"accuracy": sum(every) / len(every)} if every else {})


def _parts(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for part, value in trajectory.parts.items():
            values[f"reward_parts/{trajectory.sample.data_source}/{part}"].append(value)
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def _sums(trajectories: Iterable[Trajectory], name: str) -> list[float]:
    """Per trajectory, the sum over its policy's tokens."""
    sums = []
    for trajectory in trajectories:
        values = _policy_values([trajectory], name)
        if len(values):
            sums.append(float(values.sum()))
    return sums


def _policy_values(trajectories: Iterable[Trajectory], name: str) -> NDArray[np.float64]:
    """What is known of the policy's tokens."""
    arrays: list[NDArray[Any]] = [np.empty(0)]
    for ledger in (segment for trajectory in trajectories for segment in trajectory.segments):
        values = getattr(ledger.training, name) if ledger.training else None
        if values is not None:
            arrays.append(values[ledger.loss_mask & np.isfinite(values)])
    return np.concatenate(arrays)


def _k3(ledger: Ledger) -> NDArray[np.float64]:
    """exp(r) - 1 - r with r = reference - policy, for each of the policy's tokens."""
    if ledger.training is None or ledger.training.ref_logprobs is None:
        return np.empty(0)
    ratio = (ledger.training.ref_logprobs.astype(np.float64) - ledger.logprobs)[ledger.loss_mask]
    ratio = np.clip(ratio[~np.isnan(ratio)], -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return np.exp(ratio) - 1.0 - ratio
