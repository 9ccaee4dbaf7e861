"""What is computed on whole arrays equals the same computed token by token in plain Python, to 1e-12."""

import math
import random
from itertools import pairwise

import pytest

from turnwise.config.choices import Advantage, Correction, Excess, KLEstimator
from turnwise.training.advantages import assign, gae, returns_to_go
from turnwise.training.importance import ImportanceCorrection, correct, mismatch
from turnwise.training.kl import penalise
from turnwise.training.packing import fill, pack, tokens_by_trajectory
from turnwise.training.reward_shaping import shape_overlong
from turnwise.training.sequences import LEFT_OUT, TrainSequence
from turnwise.training.turn_credit import add_turn_credit

GAMMA, GAE_LAMBDA = 0.97, 0.9
SEEDS = range(3)


def close(values):
    return pytest.approx(values, rel=1e-12, abs=1e-13)


def made(draw, seed, **given):
    """Groups of siblings, some in two segments, one left out, with everything that models say of their tokens."""
    rnd, found = random.Random(seed), []
    for number in range(12):
        reward, group = rnd.uniform(-1, 2), LEFT_OUT if number == 7 else number // 4
        scores = {turn: rnd.uniform(-1, 1) for turn in range(3) if rnd.random() < 0.6}
        for _ in range(rnd.choice([1, 2])):
            spans = "p" * rnd.randint(1, 5)
            spans += "".join(rnd.choice("aaat") * rnd.randint(1, 40) for _ in range(rnd.randint(1, 6))) + "a"
            names = ("logprobs", "old_logprobs", "ref_logprobs", "values")
            arrays = {name: [rnd.gauss(-1, 0.5) for _ in range(spans.count("a"))] for name in names}
            found.append(draw(spans, reward=reward, group=group, trajectory=number, **arrays, **given))
            found[-1].turn_scores = scores
    return found


class Plain:
    """One trajectory as plain lists over its policy tokens."""

    def __init__(self, sequences: list[TrainSequence]) -> None:
        self.group, self.reward, self.scores = sequences[0].group, sequences[0].reward, sequences[0].turn_scores
        for name in ("logprobs", "old_logprobs", "ref_logprobs", "values", "turns", "advantages", "kl_penalties",
                     "returns", "weights"):  # fmt: skip
            row: list[float] = []
            for sequence in sequences:
                array = getattr(sequence, name)
                for at, flag in enumerate(sequence.loss_mask.tolist()):
                    if flag and array is not None:
                        row.append(array[at].item())
                    elif array is not None and name in ("advantages", "kl_penalties", "returns", "weights"):
                        assert array[at] == 0.0, f"{name} off the policy's tokens"
            setattr(self, name, row)
        self.tokens = len(self.logprobs)

    def rewards(self):
        row = [-penalty for penalty in self.kl_penalties] or [0.0] * self.tokens
        row[-1] += self.reward
        return row


def plain(sequences):
    grouped: dict[int, list[TrainSequence]] = {}
    for sequence in sequences:
        if sequence.group != LEFT_OUT:
            grouped.setdefault(sequence.trajectory, []).append(sequence)
    return [Plain(found) for found in grouped.values()]


def slow_returns(rewards, gamma):
    returns, running = [], 0.0
    for reward in reversed(rewards):
        running = reward + gamma * running
        returns.append(running)
    return returns[::-1]


def slow_gae(rewards, values, gamma, gae_lambda):
    advantages, running, following = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        running = reward + gamma * following - value + gamma * gae_lambda * running
        following = value
        advantages.append(running)
    return advantages[::-1]


def slow_whitened(rows):
    flat = [value for row in rows for value in row]
    mean = math.fsum(flat) / len(flat)
    variance = math.fsum((value - mean) ** 2 for value in flat) / (len(flat) - 1)
    return [[(value - mean) / math.sqrt(variance + 1e-8) for value in row] for row in rows]


def slow_advantages(advantage, episodes, baselines):
    rows = [slow_returns(e.rewards(), GAMMA) for e in episodes]
    match advantage:
        case Advantage.gae:
            return slow_whitened([slow_gae(e.rewards(), e.values, GAMMA, GAE_LAMBDA) for e in episodes])
        case Advantage.reinforce_pp:
            return slow_whitened(rows)
        case Advantage.remax:
            return [[v - baselines[e.group] for v in slow_returns(e.rewards(), 1.0)] for e in episodes]
    result = []
    for episode in episodes:
        group = [e.reward - math.fsum(e.kl_penalties) for e in episodes if e.group == episode.group]
        own, mean = episode.reward - math.fsum(episode.kl_penalties), math.fsum(group) / len(group)
        spread = math.sqrt(math.fsum((one - mean) ** 2 for one in group) / (len(group) - 1))
        scale = {Advantage.grpo: 1 / (spread + 1e-6), Advantage.rloo: len(group) / (len(group) - 1)}
        result.append([(own - mean) * scale.get(advantage, 1.0)] * episode.tokens)
    return result


@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.97, 0.9999, 1.0])
def test_discounted_sums_of_any_length(gamma):
    rnd = random.Random(0)
    for length in (0, 1, 2, 3, 7, 8, 9, 1000, 5000):
        rewards, values = ([rnd.gauss(0, 1) for _ in range(length)] for _ in range(2))
        # Sums of both signs cancel: the error is measured against what was added up, not against what is left.
        magnitude = max(slow_returns([abs(r) + 2 * abs(v) for r, v in zip(rewards, values, strict=True)], gamma) or [1])
        assert abs(returns_to_go(rewards, gamma) - slow_returns(rewards, gamma)).max(initial=0.0) <= 1e-14 * magnitude
        found, returns = gae(rewards, values, [True] * length, gamma, 1.0)
        expected = slow_gae(rewards, values, gamma, 1.0)
        assert abs(found - expected).max(initial=0.0) <= 1e-14 * magnitude
        assert (returns == found + values).all()


@pytest.mark.parametrize("advantage", list(Advantage))
@pytest.mark.parametrize("penalised", [False, True])
def test_advantages(draw, advantage, penalised):
    for seed in SEEDS:
        sequences, baselines = made(draw, seed), {0: 0.5, 1: -0.25, 2: 0.0}
        if penalised:
            penalise([s for s in sequences if s.group != LEFT_OUT], KLEstimator.k3, 0.2)
        before = plain(sequences)
        metrics = assign(sequences, advantage, gamma=GAMMA, gae_lambda=GAE_LAMBDA, baselines=baselines)
        after = plain(sequences)
        expected = slow_advantages(advantage, before, baselines)
        assert [e.advantages for e in after] == [close(row) for row in expected]
        assert not any(s.advantages.any() for s in sequences if s.group == LEFT_OUT)
        flat = [value for row in expected for value in row]
        assert metrics["critic/advantages/mean"] == pytest.approx(math.fsum(flat) / len(flat), abs=1e-12)
        assert metrics["critic/advantages/max"] == close(max(flat))
        if advantage is Advantage.gae:
            raw = [slow_gae(e.rewards(), e.values, GAMMA, GAE_LAMBDA) for e in before]
            wanted = [[a + v for a, v in zip(row, e.values, strict=True)] for row, e in zip(raw, before, strict=True)]
            assert [e.returns for e in after] == [close(row) for row in wanted]
        elif advantage in (Advantage.reinforce_pp, Advantage.remax):
            gamma = GAMMA if advantage is Advantage.reinforce_pp else 1.0
            assert [e.returns for e in after] == [close(slow_returns(e.rewards(), gamma)) for e in before]


def slow_kl(estimator, logprob, reference):
    difference = logprob - reference
    match estimator:
        case KLEstimator.k1:
            return difference
        case KLEstimator.abs:
            return abs(difference)
        case KLEstimator.k2:
            return difference * difference / 2
    return min(math.expm1(-difference) + difference, 10.0)


@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_kl_penalties(draw, estimator):
    for seed in SEEDS:
        sequences = [s for s in made(draw, seed) if s.group != LEFT_OUT]
        measured = penalise(sequences, estimator, 0.3)
        means = []
        for episode in plain(sequences):
            pairs = zip(episode.old_logprobs, episode.ref_logprobs, strict=True)
            row = [slow_kl(estimator, ours, theirs) for ours, theirs in pairs]
            assert episode.kl_penalties == close([0.3 * value for value in row])
            means.append(math.fsum(row) / len(row))
        assert measured.kl == close(math.fsum(means) / len(means)) and measured.trajectories == len(means)


@pytest.mark.parametrize("level", list(Correction))
@pytest.mark.parametrize("excess", list(Excess))
def test_importance_weights_and_the_gap(draw, level, excess):
    for seed in SEEDS:
        sequences = [s for s in made(draw, seed) if s.group != LEFT_OUT]
        correct(sequences, ImportanceCorrection(level, excess))
        distances: dict[int, list[float]] = {}
        for episode in plain(sequences):
            logs = [ours - theirs for ours, theirs in zip(episode.old_logprobs, episode.logprobs, strict=True)]
            total = math.fsum(logs)
            over = {
                Correction.none: [0.0] * len(logs),
                Correction.token: logs,
                Correction.sequence: [total] * len(logs),
                Correction.geometric: [total / len(logs)] * len(logs),
            }
            ratios = [math.exp(min(20.0, max(-20.0, value))) for value in over[level]]
            if excess is Excess.truncate:
                expected = [min(ratio, 2.0) for ratio in ratios]
            else:
                expected = [ratio if 0.5 <= ratio <= 2.0 else 0.0 for ratio in ratios]
            assert episode.weights == close(expected)
            for turn, value in zip(episode.turns, logs, strict=True):
                distances.setdefault(turn, []).append(abs(value))
        metrics, flat = mismatch(sequences), [value for row in distances.values() for value in row]
        assert metrics["rollout_corr/abs_diff_mean"] == close(math.fsum(flat) / len(flat))
        for turn, row in distances.items():
            assert metrics[f"rollout_corr/turn_{turn}/abs_diff_mean"] == close(math.fsum(row) / len(row))
            assert metrics[f"rollout_corr/turn_{turn}/abs_diff_max"] == max(row)


@pytest.mark.parametrize("gamma", [0.0, 0.7])
def test_credit_by_turn(draw, gamma):
    for seed in SEEDS:
        sequences = made(draw, seed)
        assign(sequences, Advantage.rloo)
        before = plain(sequences)
        add_turn_credit(sequences, 0.4, gamma)
        returns = []
        for episode in before:
            turns = sorted(set(episode.turns))
            found = slow_returns([episode.scores.get(turn, 0.0) for turn in turns], gamma)
            returns.append(dict(zip(turns, found, strict=True)))
        for number, (was, now) in enumerate(zip(before, plain(sequences), strict=True)):
            others = [
                value
                for other, episode in enumerate(before)
                if other != number and episode.group == was.group
                for value in returns[other].values()
            ]
            baseline = math.fsum(others) / len(others)
            pairs = zip(was.advantages, was.turns, strict=True)
            assert now.advantages == close([a + 0.4 * (returns[number][turn] - baseline) for a, turn in pairs])


def test_lengths_and_packing(draw):
    for seed in SEEDS:
        sequences = [s for s in made(draw, seed) if s.group != LEFT_OUT]
        written: dict[int, int] = {}
        for sequence in sequences:
            mask = sequence.loss_mask.tolist()
            written[sequence.trajectory] = written.get(sequence.trajectory, 0) + len(mask) - mask.index(True)
        limit = max(written.values())
        metrics = shape_overlong(sequences, limit=limit, buffer=limit)
        assert metrics["overlong/penalty_mean"] == close(-math.fsum(n / limit for n in written.values()) / len(written))
        whole = tokens_by_trajectory(sequences)
        for part in fill(sequences, 150):
            batch, order = pack(part, whole), list(dict.fromkeys(s.trajectory for s in part))
            tokens, index, trajectory, logprobs = [], [], [], []
            for sequence in part:
                for at, flag in enumerate(sequence.loss_mask.tolist()):
                    if flag:
                        index.append(len(tokens))
                        trajectory.append(order.index(sequence.trajectory))
                        logprobs.append(sequence.old_logprobs[at].item())
                    tokens.append(sequence.token_ids[at].item())
            assert batch.tokens.tolist() == tokens and batch.index.tolist() == index
            assert batch.trajectory.tolist() == trajectory and batch.trajectory_tokens.tolist() == [
                whole[n] for n in order
            ]
            assert batch.old_logprobs.tolist() == pytest.approx(logprobs, rel=1e-7)  # float32 at the learner's border
            assert all(low < high for low, high in pairwise(batch.index.tolist()))
