"""Rewards to advantages: how much better than expected every token of the policy turned out.

All of it counts policy tokens only. The tokens of a conversation are those of its sequences put end to end without what
tools, users and the template wrote, and the trajectory's reward lands on the last of them. Branches of an episode are
parallel: each is a chain of its own that ends in the same reward. In a baseline a trajectory counts once, however many
sequences and branches hold it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from turnwise.config.choices import Advantage, Credit
from turnwise.config.knobs import is_plugin
from turnwise.errors import ConfigError, DataError
from turnwise.training.packing import gather, write
from turnwise.training.sequences import LEFT_OUT, Floats, TrainSequence

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
            f"algorithm.advantage={advantage} compares the episodes of a group, and a group of {group_size} has no "
            "others: set training.group_size to at least 2, or the advantage to gae, reinforce_pp or remax"
        )
    if credit is Credit.turn and advantage not in GROUP_BASELINES and not is_plugin(advantage):
        names = ", ".join(choice.value for choice in GROUP_BASELINES)
        raise ConfigError(f"credit by turn compares siblings, which {advantage} does not: use one of {names}")
    for name, value in (("gamma", gamma), ("gae_lambda", gae_lambda), ("turn_gamma", turn_gamma)):
        if not 0.0 <= value <= 1.0:
            raise ConfigError(f"{name} must lie between 0 and 1, not {value}")


def gae(
    rewards: ArrayLike, values: ArrayLike, mask: ArrayLike, gamma: float, gae_lambda: float
) -> tuple[Floats, Floats]:
    """Advantages and returns of one trajectory; tokens off the mask are passed over as if they were not there."""
    reward, foreseen, policy = np.asarray(rewards, float), np.asarray(values, float), np.asarray(mask, bool)
    if not len(reward) == len(foreseen) == len(policy):
        raise ValueError(f"{len(reward)} rewards, {len(foreseen)} values and a mask of {len(policy)} differ in length")
    foreseen = foreseen[policy]
    surprise = reward[policy] + gamma * np.append(foreseen, 0.0)[1:] - foreseen
    advantages, returns = np.zeros(len(policy)), np.zeros(len(policy))
    advantages[policy] = returns_to_go(surprise, gamma * gae_lambda)
    returns[policy] = advantages[policy] + foreseen
    return advantages, returns


def returns_to_go(rewards: ArrayLike, gamma: float) -> Floats:
    """The discounted sum of the rewards from every policy token on."""
    returns = np.array(rewards, float)
    if gamma == 1.0:
        return returns[::-1].cumsum()[::-1]
    reach = 1
    # Each entry holds the sum of `reach` rewards; adding the entry that goes on from there doubles it.
    while reach < len(returns) and (discount := gamma**reach):
        returns[:-reach] += discount * returns[reach:]
        reach *= 2
    return returns


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
    """The sequences of one trajectory, or of one of its conversations, seen as one row of policy tokens."""

    def __init__(self, sequences: list[TrainSequence]) -> None:
        first = sequences[0]
        if any(s.reward != first.reward or s.group != first.group for s in sequences[1:]):
            raise ValueError(f"the sequences of trajectory {first.trajectory} differ in reward or group")
        if not math.isfinite(first.reward):
            raise DataError(f"trajectory {first.trajectory} has the reward {first.reward}")
        self.sequences = sequences
        self.number, self.group, self.reward = first.trajectory, first.group, first.reward
        self.tokens = sum(s.policy_tokens for s in sequences)
        if not self.tokens:
            raise ValueError(f"trajectory {self.number} has no policy token to reward")
        penalised = any(s.kl_penalties is not None for s in sequences)
        self.penalties: Floats = self.row("kl_penalties") if penalised else np.zeros(self.tokens)
        self.score = self.reward - float(self.penalties.sum())

    def row(self, name: str) -> Floats:
        """One array at the policy's tokens of all sequences."""
        return gather(self.sequences, name)

    def rewards(self) -> Floats:
        """One reward per policy token: the trajectory's on the last, less the KL penalty of each."""
        row: Floats = 0.0 - self.penalties
        row[-1] += self.reward
        return row

    def write(self, name: str, row: Floats) -> None:
        """Lay one value per policy token back over the sequences."""
        write(self.sequences, name, row)


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

    `advantage` is a name of choices.Advantage, or a function as custom_advantage.py describes it. `whitened` is gae's:
    advantages with mean 0 and variance 1 over the batch. `baselines` is remax's: the greedy reward of each group, None
    where the greedy rollout failed. Sequences left out get zeros; drop them with `sequences.trainable` before packing.
    """
    by_trajectory: dict[int, list[TrainSequence]] = {}
    by_branch: dict[tuple[int, int], list[TrainSequence]] = {}
    for sequence in sequences:
        if sequence.group == LEFT_OUT:
            sequence.write("advantages", np.zeros(sequence.policy_tokens))
        else:
            by_trajectory.setdefault(sequence.trajectory, []).append(sequence)
            by_branch.setdefault((sequence.trajectory, sequence.branch), []).append(sequence)
    episodes = [_Episode(parts) for parts in by_trajectory.values()]
    several = len(by_branch) > len(by_trajectory)
    chains = [_Episode(parts) for parts in by_branch.values()] if several else episodes
    if not episodes:
        raise DataError("no trajectory of the step can be trained on: all failed")
    if is_plugin(advantage):
        return {**_write_custom(episodes, advantage), "training/groups_without_baseline": 0.0}
    match Advantage(advantage):
        case Advantage.gae:
            alone = _write_gae(chains, gamma, gae_lambda, whitened)
        case Advantage.reinforce_pp:
            alone = _write_reinforce_pp(chains, gamma)
        case Advantage.remax:
            alone = _write_remax(chains, baselines)
        case Advantage.grpo | Advantage.dr_grpo | Advantage.rloo:
            alone = _write_group(episodes, Advantage(advantage))
    return {**_metrics(episodes), "training/groups_without_baseline": float(alone)}


def _write_gae(episodes: list[_Episode], gamma: float, gae_lambda: float, whitened: bool) -> int:
    if any(sequence.values is None for episode in episodes for sequence in episode.sequences):
        raise ConfigError("gae needs the values of a critic: the sequences have none")
    rows: list[Floats] = []
    for episode in episodes:
        row, returns = gae(episode.rewards(), episode.row("values"), np.ones(episode.tokens), gamma, gae_lambda)
        episode.write("returns", returns)
        rows.append(row)
    flat = np.concatenate(rows)
    _write_all(episodes, whiten(flat) if whitened else flat)
    return 0


def _write_reinforce_pp(episodes: list[_Episode], gamma: float) -> int:
    rows = [returns_to_go(episode.rewards(), gamma) for episode in episodes]
    for episode, row in zip(episodes, rows, strict=True):
        episode.write("returns", row)
    _write_all(episodes, whiten(np.concatenate(rows)))
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
        episode.write("advantages", np.zeros(episode.tokens) if baseline is None else row - baseline)
    return len(without)


def _write_group(episodes: list[_Episode], advantage: Advantage) -> int:
    groups = [episode.group for episode in episodes]
    values = against_group(advantage, [episode.score for episode in episodes], groups)
    _write_all(episodes, np.repeat(values, [episode.tokens for episode in episodes]))
    return sum(size == 1 for size in Counter(groups).values())


def _write_custom(episodes: list[_Episode], name: str) -> dict[str, float]:
    from turnwise.training import custom_advantage

    batch = custom_advantage.AdvantageBatch(
        rewards=np.array([episode.score for episode in episodes], dtype=np.float64),
        groups=np.array([episode.group for episode in episodes], dtype=np.int64),
        lengths=np.array([episode.tokens for episode in episodes], dtype=np.int64),
        turns=np.concatenate([episode.row("turns") for episode in episodes]).astype(np.int64),
    )
    _write_all(episodes, custom_advantage.advantages(name, batch))
    return _metrics(episodes)


def _write_all(episodes: list[_Episode], values: Floats) -> None:
    write([sequence for episode in episodes for sequence in episode.sequences], "advantages", values)


def _metrics(episodes: list[_Episode]) -> dict[str, float]:
    """By name: score is the task's reward, rewards the same less KL, if any; the rest is over policy tokens.

    Rewards are those of new episodes, where there are any: what the policy of earlier steps got is told there.
    """
    new = [episode for episode in episodes if not episode.sequences[0].reused] or episodes
    arrays = {
        "critic/score": np.array([episode.reward for episode in new]),
        "critic/rewards": np.array([episode.score for episode in new]),
    }
    for name in ("advantages", "returns", "values"):
        if all(getattr(s, name) is not None for episode in episodes for s in episode.sequences):
            arrays[f"critic/{name}"] = np.concatenate([episode.row(name) for episode in episodes])
    metrics = {
        f"{name}/{kind}": float(value)
        for name, array in arrays.items()
        for kind, value in (("mean", array.mean()), ("max", array.max()), ("min", array.min()))
    }
    if "critic/values" in arrays and "critic/returns" in arrays:
        metrics["critic/vf_explained_var"] = explained_variance(arrays["critic/returns"], arrays["critic/values"])
    return metrics
