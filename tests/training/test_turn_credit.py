"""Credit by turn: golden numbers, and no bias although the policy decides how many turns there are."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from turnwise import configure
from turnwise.config.choices import Advantage, Credit
from turnwise.errors import ConfigError
from turnwise.training.advantages import assign, check
from turnwise.training.sequences import LEFT_OUT, TrainSequence, to_sequences
from turnwise.training.turn_credit import add_turn_credit
from turnwise.types import FinishReason, Group, Ledger, Message, Origin, Role, Sample, StopReason, Trajectory, Turn

# --- golden numbers -----------------------------------------------------------------------------------------------


def test_uniform_credit_gives_the_released_numbers(draw: Any) -> None:
    rewards = [1.8, 0.3, 0.8, 0.3]
    made = [draw("ppataa", reward=reward, trajectory=n) for n, reward in enumerate(rewards)]
    assign(made, Advantage.grpo)
    for sequence, expected in zip(made, [1.41421, -0.70711, 0.0, -0.70711], strict=True):
        assert sequence.advantages == pytest.approx([0, 0, expected, 0, expected, expected], abs=1e-5)
        assert [a for a, own in zip(sequence.advantages, sequence.loss_mask, strict=True) if not own] == [0, 0, 0]


def with_scores(sequence: TrainSequence, scores: dict[int, float]) -> TrainSequence:
    sequence.turn_scores = scores
    return sequence


def test_turn_credit_by_hand(draw: Any) -> None:
    # Sibling 0: tool turns 1.0 and -0.5, then the answer; sibling 1: tool turn 0.25, then the answer.
    # Baselines: of 0 (0.25 + 0) / 2 = 0.125, of 1 (1 - 0.5 + 0) / 3 = 1/6. rloo with rewards 1, 0: +1, -1. Weight 0.5:
    # 0: 1 + 0.5 (1 - 0.125) = 1.4375; 1 + 0.5 (-0.5 - 0.125) = 0.6875; the answer 1 + 0.5 (0 - 0.125) = 0.9375.
    # 1: -1 + 0.5 (0.25 - 1/6) = -0.958333; the answer -1 - 0.5 / 6 = -1.083333.
    made = [
        with_scores(draw("paatata", reward=1.0, trajectory=0), {0: 1.0, 1: -0.5}),
        with_scores(draw("patta", reward=0.0, trajectory=1), {0: 0.25}),
    ]
    assign(made, Advantage.rloo)
    found = add_turn_credit(made, 0.5)
    assert made[0].advantages == pytest.approx([0, 1.4375, 1.4375, 0, 0.6875, 0, 0.9375])
    assert made[1].advantages == pytest.approx([0, -0.9583333, 0, 0, -1.0833333])
    assert made[0].advantages[3] == made[0].advantages[5] == made[1].advantages[2] == 0.0
    assert found == {"turn_credit/scored_turns": 3.0, "turn_credit/score_mean": 0.25}


def test_gamma_lets_earlier_turns_answer_for_later_scores(draw: Any) -> None:
    # Returns with gamma 0.5: (1 - 0.25, -0.5, 0) and (0, 0); baseline of 0 is 0, of 1 is 0.25 / 3.
    made = [
        with_scores(draw("patata", trajectory=0), {0: 1.0, 1: -0.5}),
        with_scores(draw("pata", trajectory=1), {}),
    ]
    assign(made, Advantage.rloo)
    add_turn_credit(made, 1.0, 0.5)
    assert made[0].advantages == pytest.approx([0, 0.75, 0, -0.5, 0, 0])
    assert made[1].advantages == pytest.approx([0, -0.25 / 3, 0, -0.25 / 3])


def test_a_bad_tool_turn_gets_less_than_a_siblings_good_one(draw: Any) -> None:
    made = [with_scores(draw("pata", trajectory=n), {0: score}) for n, score in enumerate((1.0, -0.5))]
    assign(made, Advantage.grpo)
    add_turn_credit(made, 0.5)
    assert made[0].gather("advantages")[0] > 0 > made[1].gather("advantages")[0]


def test_segments_of_one_trajectory_share_its_turns(draw: Any) -> None:
    first, second = draw("pata", trajectory=0), draw("ppa", trajectory=0)
    second.turns = np.array([2, 2, 2])
    other = with_scores(draw("pata", trajectory=1), {})
    for sequence in (first, second):
        sequence.turn_scores = {0: 1.0, 2: 0.5}
    made = [first, second, other]
    assign(made, Advantage.dr_grpo)
    add_turn_credit(made, 1.0)
    assert first.advantages.tolist() == [0, 1.0, 0, 0.0] and second.advantages.tolist() == [0, 0, 0.5]
    assert other.advantages.tolist() == [0, -0.5, 0, -0.5], "three turns of the sibling, 1.5 in all"


def test_nobody_to_compare_with_means_no_credit(draw: Any) -> None:
    alone = with_scores(draw("pata", reward=3.0), {0: 1.0})
    failed = with_scores(draw("pata", group=LEFT_OUT, trajectory=1, reward=math.nan), {0: 1.0})
    assign([alone, failed], Advantage.grpo)
    assert add_turn_credit([alone, failed], 1.0)["turn_credit/scored_turns"] == 1.0
    assert alone.advantages.tolist() == failed.advantages.tolist() == [0, 0, 0, 0]


def test_sequences_that_disagree_about_their_trajectory_are_refused(draw: Any) -> None:
    made = [with_scores(draw("pa"), {0: 1.0}), with_scores(draw("pa"), {})]
    assign(made, Advantage.grpo)
    with pytest.raises(ValueError, match="trajectory 0 differ in their turn scores"):
        add_turn_credit(made, 1.0)


def test_recorded_turn_scores_reach_the_sequences() -> None:
    ledger = Ledger()
    ledger.append([5], Origin.PROMPT, 0)
    ledger.append([6], Origin.POLICY, 0, [-1.0], 0)
    ledger.append([7], Origin.TOOL, 0)
    ledger.append([8], Origin.POLICY, 1, [-1.0], 0)
    turns = [Turn(n, Message(Role.ASSISTANT, "x"), FinishReason.STOP, 0, 1, 1) for n in range(2)]
    turns[0].scores = {"tool": 0.75, "form": -0.25}
    sample = Sample("s", (), "d")
    trajectory = Trajectory(sample, 0, 0, [], turns, [ledger], StopReason.ANSWERED, 0.0, reward=1.0)
    (made,) = to_sequences([Group(sample, [trajectory])])
    assert made.turn_scores == {0: 0.5}


def test_estimators_that_compare_nobody_are_refused_beforehand() -> None:
    check(Advantage.rloo, group_size=2, credit=Credit.turn, turn_gamma=1.0)
    with pytest.raises(ConfigError, match="credit by turn compares siblings, which gae does not"):
        check(Advantage.gae, group_size=4, credit=Credit.turn)
    with pytest.raises(ConfigError, match="turn_gamma must lie between 0 and 1"):
        check(Advantage.rloo, group_size=4, credit=Credit.turn, turn_gamma=1.5)
    assert configure("algorithm.credit=turn", "algorithm.turn_weight=0.2").algorithm.turn_weight == 0.2


# --- no bias: a policy that decides when to stop, enumerated --------------------------------------------------------

GOOD, BAD, ANSWER = range(3)
LAST = 2
"""At this turn there is nothing left but to answer."""
SCORES = {GOOD: 1.0, BAD: -0.25}
WEIGHT = 0.7
LOGITS = np.array([[0.3, -0.2, 0.4], [-0.6, 0.5, 0.1]])
Credit_ = Callable[[list[TrainSequence]], None]


def softmax(row: Any) -> Any:
    weights = np.exp(row - row.max())
    return weights / weights.sum()


@dataclass(frozen=True)
class Episode:
    """Actions at the turns where the policy had a choice."""

    actions: tuple[int, ...]

    @property
    def scores(self) -> dict[int, float]:
        return {turn: SCORES[action] for turn, action in enumerate(self.actions) if action != ANSWER}

    @property
    def outcome(self) -> float:
        """One good look pays off, a second one does not; guessing sometimes does."""
        return 0.3 if not self.scores else float(GOOD in self.actions) - 0.1 * (len(self.scores) - 1)

    def probability(self, logits: Any) -> float:
        return math.prod(softmax(logits[turn])[action] for turn, action in enumerate(self.actions))

    def grad_logprob(self, turn: int) -> Any:
        grad = np.zeros_like(LOGITS)
        if turn < len(self.actions):  # the forced answer has no parameter
            grad[turn] = -softmax(LOGITS[turn])
            grad[turn, self.actions[turn]] += 1
        return grad


EPISODES = [
    Episode(actions)
    for length in (1, 2)
    for actions in itertools.product((GOOD, BAD, ANSWER), repeat=length)
    if (actions[-1] == ANSWER or length == LAST) and ANSWER not in actions[:-1]
]


def groups(size: int) -> Iterator[tuple[float, tuple[Episode, ...]]]:
    for found in itertools.product(EPISODES, repeat=size):
        yield math.prod(episode.probability(LOGITS) for episode in found), found


def expected_gradient(draw: Any, credit: Credit_, size: int = 3) -> Any:
    """The mean over all groups of what the estimator says, each weighed by its probability."""
    total = np.zeros_like(LOGITS)
    for probability, found in groups(size):
        made = []
        for number, episode in enumerate(found):
            spans = "p" + "at" * len(episode.scores) + "a"
            made.append(with_scores(draw(spans, reward=episode.outcome, trajectory=number), episode.scores))
        assign(made, Advantage.rloo)
        credit(made)
        for sequence, episode in zip(made, found, strict=True):
            for turn, advantage in enumerate(sequence.gather("advantages")):
                total += probability / size * advantage * episode.grad_logprob(turn)
    return total


def slope(objective: Callable[[Any], float]) -> Any:
    """By central differences."""
    grad, step = np.zeros_like(LOGITS), 1e-5
    for place in np.ndindex(LOGITS.shape):
        moved = np.zeros_like(LOGITS)
        moved[place] = step
        grad[place] = (objective(LOGITS + moved) - objective(LOGITS - moved)) / (2 * step)
    return grad


def whole(logits: Any) -> float:
    """E[outcome + WEIGHT * sum of scores]."""
    worth = ((e, e.outcome + WEIGHT * sum(e.scores.values())) for e in EPISODES)
    return sum(episode.probability(logits) * value for episode, value in worth)


def own_scores_only(logits: Any) -> float:
    """E[outcome], and at each turn the expected score of that turn, the way there held fixed."""
    total = sum(episode.probability(logits) * episode.outcome for episode in EPISODES)
    reach = 1.0
    for turn in range(LAST):
        now = softmax(logits[turn])
        total += reach * WEIGHT * sum(now[action] * score for action, score in SCORES.items())
        reach *= 1 - softmax(LOGITS[turn])[ANSWER]
    return float(total)


def test_the_toy_is_a_distribution() -> None:
    assert len(EPISODES) == 7
    assert sum(episode.probability(LOGITS) for episode in EPISODES) == pytest.approx(1)


@pytest.mark.parametrize(("gamma", "objective"), [(1.0, whole), (0.0, own_scores_only)])
def test_the_expected_gradient_is_the_true_one(draw: Any, gamma: float, objective: Callable[[Any], float]) -> None:
    def credit(made: list[TrainSequence]) -> None:
        add_turn_credit(made, WEIGHT, gamma)

    assert expected_gradient(draw, credit) == pytest.approx(slope(objective), abs=1e-8)


def by_turn_index(made: list[TrainSequence]) -> None:
    """The usual way: each turn against all scored turns of the same index, its own included."""
    for turn in range(LAST):
        column = [s.turn_scores[turn] for s in made if turn in s.turn_scores]
        for sequence in made:
            if turn in sequence.turn_scores:
                _shift(sequence, turn, WEIGHT * (sequence.turn_scores[turn] - sum(column) / len(column)))


def on_scored_turns_only(made: list[TrainSequence]) -> None:
    """The siblings' mean, but taken off tool turns only: the answer keeps its bare advantage."""
    for sequence in made:
        others = [score for s in made if s is not sequence for score in s.turn_scores.values()]
        for turn, score in sequence.turn_scores.items():
            _shift(sequence, turn, WEIGHT * (score - (sum(others) / len(others) if others else 0.0)))


def _shift(sequence: TrainSequence, turn: int, by: float) -> None:
    row = sequence.gather("advantages")
    row[turn] += by
    sequence.write("advantages", row)


@pytest.mark.parametrize("credit", [by_turn_index, on_scored_turns_only])
def test_the_usual_baselines_fail_the_same_test(draw: Any, credit: Credit_) -> None:
    found = expected_gradient(draw, credit)
    for objective in (whole, own_scores_only):
        assert np.abs(found - slope(objective)).max() > 0.01
