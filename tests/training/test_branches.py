"""Credit of parallel sequences: every advantage against a reference that walks the branches token by token."""

import math
import random

import numpy as np
import pytest

from turnwise.config.choices import Advantage
from turnwise.training.advantages import EPSILON, assign
from turnwise.training.sequences import LEFT_OUT, TrainSequence, to_sequences
from turnwise.training.turn_credit import add_turn_credit
from turnwise.types import (
    Branch,
    FinishReason,
    Group,
    Ledger,
    Message,
    Origin,
    Role,
    Sample,
    StopReason,
    Trajectory,
    Turn,
)

SAMPLE = Sample("s", (Message(Role.USER, "?"),), "test")


def sequence(random_: random.Random, *, trajectory: int, group: int, branch: int, reward: float, turns: list[int]):
    """One segment with two or three policy tokens a turn and tokens of others in between."""
    mask, places = [False], [turns[0]]
    for turn in turns:
        for own in (False, *[True] * random_.randint(2, 3)):
            mask.append(own)
            places.append(turn)
    draw = [random_.uniform(-1, 1) for _ in mask]
    made = TrainSequence(
        np.arange(len(mask)), mask, np.where(mask, draw, 0.0), places, 0, trajectory, group, reward, branch=branch
    )
    made.write("values", [random_.uniform(-1, 1) for _ in range(made.policy_tokens)])
    made.write("kl_penalties", [random_.uniform(0, 0.1) for _ in range(made.policy_tokens)])
    return made


def episodes(seed: int) -> list[TrainSequence]:
    """Groups of three trajectories; each with a main conversation of one or two segments and up to two branches."""
    random_ = random.Random(seed)
    found: list[TrainSequence] = []
    for number in range(6):
        reward, turn = random_.uniform(-1, 1), 0
        scores = {at: random_.uniform(-1, 1) for at in range(8) if random_.random() < 0.5}
        for branch in range(random_.randint(1, 3)):
            for _ in range(random_.randint(1, 2) if branch == 0 else 1):
                turns = [turn, turn + 1] if random_.random() < 0.5 else [turn]
                turn = turns[-1] + 1
                made = sequence(
                    random_, trajectory=number, group=number // 3, branch=branch, reward=reward, turns=turns
                )
                made.turn_scores = scores
                found.append(made)
    return found


def walked(found: list[TrainSequence], name: str) -> list[tuple[tuple[int, int], float]]:
    """((trajectory, branch), value) of every policy token, one at a time."""
    return [
        ((one.trajectory, one.branch), float(getattr(one, name)[place]))
        for one in found
        for place in range(len(one.token_ids))
        if one.loss_mask[place]
    ]


def chains(found: list[TrainSequence]) -> dict[tuple[int, int], list[float]]:
    """The rewards of every conversation's tokens: minus its own penalties, the trajectory's reward on its last."""
    rewards: dict[tuple[int, int], list[float]] = {}
    for key, penalty in walked(found, "kl_penalties"):
        rewards.setdefault(key, []).append(-penalty)
    for (trajectory, _), row in rewards.items():
        row[-1] += next(one.reward for one in found if one.trajectory == trajectory)
    return rewards


def in_order(found: list[TrainSequence], by_key: dict[tuple[int, int], list[float]]) -> list[float]:
    """Values by conversation, laid over the tokens in the order of the sequences."""
    left = {key: list(row) for key, row in by_key.items()}
    return [left[key].pop(0) for key, _ in walked(found, "logprobs")]


def advantages(found: list[TrainSequence]) -> list[float]:
    return [value for _, value in walked(found, "advantages")]


@pytest.mark.parametrize("seed", range(8))
def test_gae_of_branches(seed):
    found = episodes(seed)
    assign(found, Advantage.gae, gamma=0.9, gae_lambda=0.8, whitened=False)
    values: dict[tuple[int, int], list[float]] = {}
    for key, value in walked(found, "values"):
        values.setdefault(key, []).append(value)
    expected: dict[tuple[int, int], list[float]] = {}
    for key, rewards in chains(found).items():
        row, running, later = [0.0] * len(rewards), 0.0, 0.0
        for at in reversed(range(len(rewards))):
            running = rewards[at] + 0.9 * later - values[key][at] + 0.9 * 0.8 * running
            row[at], later = running, values[key][at]
        expected[key] = row
    assert advantages(found) == pytest.approx(in_order(found, expected))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("advantage", [Advantage.reinforce_pp, Advantage.remax])
def test_returns_of_branches(seed, advantage):
    found = episodes(seed)
    gamma = 0.9 if advantage is Advantage.reinforce_pp else 1.0
    assign(found, advantage, gamma=gamma, baselines={0: 0.3, 1: -0.2})
    expected: dict[tuple[int, int], list[float]] = {}
    for key, rewards in chains(found).items():
        expected[key] = [
            sum(reward * gamma**ahead for ahead, reward in enumerate(rewards[at:])) for at in range(len(rewards))
        ]
    flat = np.array(in_order(found, expected))
    assert [value for _, value in walked(found, "returns")] == pytest.approx(flat.tolist())
    if advantage is Advantage.remax:
        groups = [one.group for one in found for _ in range(one.policy_tokens)]
        flat -= np.array([{0: 0.3, 1: -0.2}[group] for group in groups])
    else:
        flat = (flat - flat.mean()) / math.sqrt(flat.var(ddof=1) + 1e-8)
    assert advantages(found) == pytest.approx(flat.tolist())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("advantage", [Advantage.grpo, Advantage.dr_grpo, Advantage.rloo])
def test_group_baselines_count_a_trajectory_once(seed, advantage):
    found = episodes(seed)
    metrics = assign(found, advantage)
    scores = {one.trajectory: one.reward for one in found}
    for (trajectory, _), penalty in walked(found, "kl_penalties"):
        scores[trajectory] -= penalty
    for one in found:
        siblings = np.array([scores[other] for other in range(one.group * 3, one.group * 3 + 3)])
        score = scores[one.trajectory]
        expected = {
            Advantage.grpo: (score - siblings.mean()) / (siblings.std(ddof=1) + EPSILON),
            Advantage.dr_grpo: score - siblings.mean(),
            Advantage.rloo: score - (siblings.sum() - score) / 2,
        }[advantage]
        assert one.gather("advantages").tolist() == pytest.approx([expected] * one.policy_tokens)
    assert metrics["critic/score/mean"] == pytest.approx(
        np.mean([next(one.reward for one in found if one.trajectory == number) for number in range(6)])
    )


@pytest.mark.parametrize("gamma", [0.0, 0.7, 1.0])
def test_credit_by_turn_stays_in_its_branch(gamma):
    found = episodes(5)
    assign(found, Advantage.dr_grpo)
    before = [one.gather("advantages") for one in found]
    add_turn_credit(found, 2.0, gamma)
    turns: dict[tuple[int, int], list[int]] = {}
    for one in found:
        turns.setdefault((one.trajectory, one.branch), []).extend(sorted(set(one.turns[one.policy].tolist())))
    credit: dict[tuple[int, int], float] = {}
    for (trajectory, _), own in turns.items():
        scores = next(one.turn_scores for one in found if one.trajectory == trajectory)
        for at, turn in enumerate(own):
            credit[trajectory, turn] = sum(scores.get(later, 0.0) * gamma**n for n, later in enumerate(own[at:]))
    for one, old in zip(found, before, strict=True):
        others = [value for (who, _), value in credit.items() if who != one.trajectory and who // 3 == one.group]
        expected = [
            value + 2.0 * (credit[one.trajectory, turn] - np.mean(others))
            for value, turn in zip(old, one.turns[one.policy].tolist(), strict=True)
        ]
        assert one.gather("advantages").tolist() == pytest.approx(expected)


def custom(batch):
    assert len(batch.rewards) == 6
    return batch.rewards


def test_own_advantage_sees_trajectories():
    found = episodes(3)
    assign(found, f"{__file__}:custom")
    for one in found:
        assert len(set(one.gather("advantages").tolist())) == 1


def ledger(turn: int, words: int) -> Ledger:
    made = Ledger()
    made.append([1, 2], Origin.PROMPT, turn)
    made.append(range(words), Origin.POLICY, turn, [-0.5] * words, 0)
    return made


def turn_at(index: int, segment: int) -> Turn:
    return Turn(index, Message(Role.ASSISTANT, "w"), FinishReason.STOP, 0, 2, 3, segment=segment, start=2)


def branched(sibling: int = 0) -> Trajectory:
    """A main conversation, a trained and an untrained branch."""
    return Trajectory(
        SAMPLE,
        sibling,
        0,
        [*SAMPLE.prompt, Message(Role.ASSISTANT, "w")],
        [turn_at(0, 0)],
        [ledger(0, 3), ledger(1, 3), ledger(2, 3)],
        StopReason.ANSWERED,
        0.1,
        reward=1.0,
        branches=[
            Branch("untrained", [], [turn_at(1, 1)], trained=False),
            Branch("trained", [], [turn_at(2, 2)]),
        ],
    )


def test_untrained_branches_never_become_sequences():
    first, second = branched(), branched(1)
    for trajectory in (first, second):
        for turn in trajectory.every_turn:
            turn.scores = {"good": turn.index}
    found = to_sequences([Group(SAMPLE, [first, second])])
    assert [(one.trajectory, one.segment, one.branch, one.group) for one in found] == [
        (0, 0, 0, 0), (0, 2, 2, 0), (1, 0, 0, 0), (1, 2, 2, 0)
    ]  # fmt: skip
    assert found[0].turn_scores == {0: 0, 2: 2}
    assert all(one.group == LEFT_OUT for one in to_sequences([first])) and len(to_sequences([first])) == 2
