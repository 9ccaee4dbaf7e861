"""Rewards to advantages: how much better than expected every token of the policy turned out.

All of it counts policy tokens only. A trajectory's tokens are those of its sequences put end to end without what tools,
users and the template wrote, and its reward lands on the last of them; a trajectory counts once however many sequences
hold it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from turnwise.choices import Advantage, Credit
from turnwise.errors import ConfigError, DataError
from turnwise.knobs import is_plugin
from turnwise.training import custom
from turnwise.training.sequences import LEFT_OUT, TrainSequence

Floats = npt.NDArray[np.float64]
EPSILON = 1e-6
"""Keeps the division by a group's standard deviation finite."""


GROUP_BASELINES = (Advantage.grpo, Advantage.dr_grpo, Advantage.rloo)
"""Those that compare siblings and need at least two."""


def check(
    advantage: str,
    *,
    group_size: int,
    gamma: float = 1.0,
    gae_lambda: float = 1.0,
    credit: Credit = Credit.uniform,
    turn_gamma: float = 0.0,
) -> None:
    """Refuse choices that cannot work, before anything is rolled out."""
    if advantage in GROUP_BASELINES and group_size < 2:
        raise ConfigError(
            f"{advantage} compares the siblings of a group and a group of {group_size} has none: "
            "use a group size of at least 2, or gae, reinforce_pp or remax"
        )
    if credit is Credit.turn and advantage not in GROUP_BASELINES and not is_plugin(advantage):
        names = ", ".join(choice.value for choice in GROUP_BASELINES)
        raise ConfigError(f"credit by turn compares siblings, which {advantage} does not: use one of {names}")
    for name, value in (("gamma", gamma), ("gae_lambda", gae_lambda), ("turn_gamma", turn_gamma)):
        if not 0.0 <= value <= 1.0:
            raise ConfigError(f"{name} must lie between 0 and 1, not {value}")


def gae(
    rewards: Sequence[float], values: Sequence[float], mask: Sequence[bool], gamma: float, gae_lambda: float
) -> tuple[list[float], list[float]]:
    """Advantages and returns of one trajectory; tokens off the mask are passed over as if they were not there."""
    if not len(rewards) == len(values) == len(mask):
        raise ValueError(f"{len(rewards)} rewards, {len(values)} values and a mask of {len(mask)} differ in length")
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    next_value = running = 0.0
    for at in reversed(range(len(mask))):
        if mask[at]:
            running = rewards[at] + gamma * next_value - values[at] + gamma * gae_lambda * running
            next_value = values[at]
            advantages[at], returns[at] = running, running + values[at]
    return advantages, returns


def returns_to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    """The discounted sum of the rewards from every policy token on."""
    returns: list[float] = []
    running = 0.0
    for reward in reversed(rewards):
        running = reward + gamma * running
        returns.append(running)
    return returns[::-1]


def against_group(advantage: Advantage, rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """One advantage per trajectory by its siblings; 0 for the only one of its group and for those left out."""
    if len(rewards) != len(groups):
        raise ValueError(f"{len(rewards)} rewards with {len(groups)} groups")
    members: dict[int, list[int]] = {}
    for at, group in enumerate(groups):
        if group != LEFT_OUT:
            members.setdefault(group, []).append(at)
    result = [0.0] * len(rewards)
    for siblings in members.values():
        if len(siblings) < 2:
            continue
        scores = np.array([rewards[at] for at in siblings], dtype=np.float64)
        for at, value in zip(siblings, _compared(advantage, scores), strict=True):
            result[at] = float(value)
    return result


def _compared(advantage: Advantage, scores: Floats) -> Floats:
    centred: Floats = scores - scores.mean()
    match advantage:
        case Advantage.grpo:
            return centred / float(scores.std(ddof=1) + EPSILON)
        case Advantage.dr_grpo:
            return centred
        case Advantage.rloo:  # r - (sum - r) / (n - 1)
            return centred * (len(scores) / (len(scores) - 1))
        case Advantage.gae | Advantage.reinforce_pp | Advantage.remax:
            raise ValueError(f"{advantage.value} does not compare siblings")


def whiten(values: Floats) -> Floats:
    """Mean 0 and sample variance 1."""
    if len(values) < 2:
        raise DataError(f"{len(values)} policy tokens in the batch cannot be whitened")
    whitened: Floats = (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)
    return whitened


def explained_variance(returns: Floats, values: Floats) -> float:
    """The share of the returns' variance that the critic foresaw: 1 is perfect, 0 as good as their mean."""
    return float(1.0 - (returns - values).var(ddof=1) / (returns.var(ddof=1) + 1e-5)) if len(returns) > 1 else 0.0


class _Episode:
    """The sequences of one trajectory seen as one row of policy tokens."""

    def __init__(self, sequences: list[TrainSequence]) -> None:
        first = sequences[0]
        if any(s.reward != first.reward or s.group != first.group for s in sequences[1:]):
            raise ValueError(f"the sequences of trajectory {first.trajectory} differ in reward or group")
        if not math.isfinite(first.reward):
            raise DataError(f"trajectory {first.trajectory} has the reward {first.reward}")
        self.sequences = sequences
        self.number, self.group, self.reward = first.trajectory, first.group, first.reward
        self.penalties = self.row("kl_penalties") if any(s.kl_penalties is not None for s in sequences) else []
        self.tokens = sum(s.policy_tokens for s in sequences)
        if not self.tokens:
            raise ValueError(f"trajectory {self.number} has no policy token to reward")
        self.score = self.reward - sum(self.penalties)

    def row(self, name: str) -> list[float]:
        """One array at the policy's tokens of all sequences."""
        return [value for sequence in self.sequences for value in sequence.gather(name)]

    def turns(self) -> list[int]:
        """The turn of every policy token."""
        return [turn for s in self.sequences for turn, written in zip(s.turns, s.loss_mask, strict=True) if written]

    def rewards(self) -> list[float]:
        """One reward per policy token: the trajectory's on the last, less the KL penalty of each."""
        row = [-penalty for penalty in self.penalties] or [0.0] * self.tokens
        row[-1] += self.reward
        return row

    def write(self, name: str, row: Sequence[float]) -> None:
        """Lay one value per policy token back over the sequences."""
        start = 0
        for sequence in self.sequences:
            end = start + sequence.policy_tokens
            setattr(sequence, name, sequence.scatter(row[start:end]))
            start = end


def assign(
    sequences: Sequence[TrainSequence],
    advantage: str,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 1.0,
    whitened: bool = True,
    baselines: Mapping[int, float | None] | None = None,
) -> dict[str, float]:
    """Write advantages (and returns, where tokens have their own) into the sequences; returns the step's metrics.

    `advantage` is a name of choices.Advantage, or a user's function as custom.py describes it. `whitened` is gae's:
    advantages with mean 0 and variance 1 over the batch. `baselines` is remax's: the greedy reward of each group, None
    where the greedy rollout failed. Sequences left out get zeros; drop them with `sequences.trainable` before packing.
    """
    by_trajectory: dict[int, list[TrainSequence]] = {}
    for sequence in sequences:
        if sequence.group == LEFT_OUT:
            sequence.advantages = [0.0] * len(sequence.token_ids)
        else:
            by_trajectory.setdefault(sequence.trajectory, []).append(sequence)
    episodes = [_Episode(found) for found in by_trajectory.values()]
    if not episodes:
        raise DataError("no trajectory of the step can be trained on: all failed")
    if is_plugin(advantage):
        return {**_write_custom(episodes, advantage), "training/groups_without_baseline": 0.0}
    match Advantage(advantage):
        case Advantage.gae:
            alone = _write_gae(episodes, gamma, gae_lambda, whitened)
        case Advantage.reinforce_pp:
            alone = _write_reinforce_pp(episodes, gamma)
        case Advantage.remax:
            alone = _write_remax(episodes, baselines)
        case Advantage.grpo | Advantage.dr_grpo | Advantage.rloo:
            alone = _write_group(episodes, Advantage(advantage))
    return {**_metrics(episodes), "training/groups_without_baseline": float(alone)}


def _write_gae(episodes: list[_Episode], gamma: float, gae_lambda: float, whitened: bool) -> int:
    if any(sequence.values is None for episode in episodes for sequence in episode.sequences):
        raise ConfigError("gae needs the values of a critic: the sequences have none")
    rows: list[list[float]] = []
    for episode in episodes:
        row, returns = gae(episode.rewards(), episode.row("values"), [True] * episode.tokens, gamma, gae_lambda)
        episode.write("returns", returns)
        rows.append(row)
    _write_all(episodes, whiten(_flat(rows)) if whitened else _flat(rows))
    return 0


def _write_reinforce_pp(episodes: list[_Episode], gamma: float) -> int:
    rows = [returns_to_go(episode.rewards(), gamma) for episode in episodes]
    for episode, row in zip(episodes, rows, strict=True):
        episode.write("returns", row)
    _write_all(episodes, whiten(_flat(rows)))
    return 0


def _write_remax(episodes: list[_Episode], baselines: Mapping[int, float | None] | None) -> int:
    if baselines is None:
        raise ConfigError("remax needs the reward of a greedy rollout of every sample")
    without = set()
    for episode in episodes:
        if episode.group not in baselines:
            raise ValueError(f"group {episode.group} has no greedy baseline")
        baseline = baselines[episode.group]
        row = returns_to_go(episode.rewards(), 1.0)
        episode.write("returns", row)
        if baseline is None:
            without.add(episode.group)
        episode.write("advantages", [0.0 if baseline is None else value - baseline for value in row])
    return len(without)


def _write_group(episodes: list[_Episode], advantage: Advantage) -> int:
    groups = [episode.group for episode in episodes]
    values = against_group(advantage, [episode.score for episode in episodes], groups)
    for episode, value in zip(episodes, values, strict=True):
        episode.write("advantages", [value] * episode.tokens)
    return sum(size == 1 for size in Counter(groups).values())


def _write_custom(episodes: list[_Episode], name: str) -> dict[str, float]:
    batch = custom.AdvantageBatch(
        rewards=np.array([episode.score for episode in episodes], dtype=np.float64),
        groups=np.array([episode.group for episode in episodes], dtype=np.int64),
        lengths=np.array([episode.tokens for episode in episodes], dtype=np.int64),
        turns=np.array([turn for episode in episodes for turn in episode.turns()], dtype=np.int64),
    )
    _write_all(episodes, custom.advantages(name, batch))
    return _metrics(episodes)


def _flat(rows: list[list[float]]) -> Floats:
    return np.array([value for row in rows for value in row], dtype=np.float64)


def _write_all(episodes: list[_Episode], values: Floats) -> None:
    start = 0
    for episode in episodes:
        episode.write("advantages", values[start : start + episode.tokens].tolist())
        start += episode.tokens


def _metrics(episodes: list[_Episode]) -> dict[str, float]:
    """verl's names: score is the task's reward, rewards the same less KL, if any; the rest is over policy tokens."""
    arrays = {
        "critic/score": np.array([episode.reward for episode in episodes]),
        "critic/rewards": np.array([episode.score for episode in episodes]),
    }
    for name in ("advantages", "returns", "values"):
        if all(getattr(s, name) is not None for episode in episodes for s in episode.sequences):
            arrays[f"critic/{name}"] = _flat([episode.row(name) for episode in episodes])
    found = {
        f"{name}/{kind}": float(value)
        for name, array in arrays.items()
        for kind, value in (("mean", array.mean()), ("max", array.max()), ("min", array.min()))
    }
    if "critic/values" in arrays and "critic/returns" in arrays:
        found["critic/vf_explained_var"] = explained_variance(arrays["critic/returns"], arrays["critic/values"])
    return found
