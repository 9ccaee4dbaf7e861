"""Every knob of `algorithm` arrives: set to another value, it does what the bare function does with that value."""

import asyncio
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from turnwise.config import AlgorithmConfig
from turnwise.config.choices import Correction, Excess, KLEstimator, OldLogprobs
from turnwise.data.task_config import configure
from turnwise.engines.learners.learner import Objective
from turnwise.rollout.prepare import prepare
from turnwise.training import importance, kl
from turnwise.training.advantages import assign
from turnwise.training.optimise import assign_credit, needs_critic, needs_reference
from turnwise.training.reward_shaping import shape_overlong
from turnwise.training.run_engines import open_engines
from turnwise.training.sequences import TrainSequence
from turnwise.training.staleness import treatment
from turnwise.training.turn_credit import add_turn_credit

LEARNERS = ("algorithm.old_logprobs=learner", "algorithm.correction=token")
Bare = Callable[[list[TrainSequence]], object]


@pytest.fixture
def made(draw):
    """Two siblings of which the first is longer, with all that penalties, critics and corrections read."""

    def make() -> list[TrainSequence]:
        found = []
        for number, (spans, reward) in enumerate((("ppaataua", 1.0), ("ppaataa", 0.25))):
            arrays = {
                "values": [0.1, 0.3, 0.2, 0.5], "old_logprobs": [-1.0, -0.5, -2.0, -0.3],
                "ref_logprobs": [-0.4, -0.9, -1.0, -0.8], "logprobs": [-2.5, -0.6, -1.1, -1.9],
            }  # fmt: skip
            sequence = draw(spans, reward=reward, trajectory=number, **arrays)
            sequence.turn_scores = {0: 0.5 - number, 1: 0.25}
            found.append(sequence)
        return found

    return make


def credited(sequences: list[TrainSequence], *settings: str, controller: Any = None) -> list[TrainSequence]:
    assign_credit(sequences, configure(*settings), controller, None)
    return sequences


def rows(sequences: list[TrainSequence], name: str) -> list[float]:
    return np.concatenate([sequence.gather(name) for sequence in sequences]).tolist()


def by_advantage(name: str, **options: float) -> Bare:
    return lambda sequences: assign(sequences, name, **options)  # type: ignore[arg-type]


def by_turns(weight: float, gamma: float) -> Bare:
    def work(sequences: list[TrainSequence]) -> None:
        assign(sequences, "grpo")
        add_turn_credit(sequences, weight, gamma)

    return work


def by_length(limit: int, buffer: int, factor: float) -> Bare:
    def work(sequences: list[TrainSequence]) -> None:
        shape_overlong(sequences, limit=limit, buffer=buffer, factor=factor)
        assign(sequences, "grpo")

    return work


TURN, GAE = ("algorithm.credit=turn",), ("algorithm.advantage=gae",)
LONG = ("rollout.max_tokens=7",)
CREDIT: dict[str, tuple[tuple[str, ...], str, Bare]] = {
    "advantage": ((), "rloo", by_advantage("rloo")),
    "credit": ((), "turn", by_turns(0.5, 0.0)),
    "turn_weight": (TURN, "2.0", by_turns(2.0, 0.0)),
    "turn_gamma": (TURN, "0.75", by_turns(0.5, 0.75)),
    "gamma": (GAE, "0.5", by_advantage("gae", gamma=0.5)),
    "gae_lambda": (GAE, "0.25", by_advantage("gae", gae_lambda=0.25)),
    "overlong_tokens": (LONG, "4", by_length(7, 4, 1.0)),
    "overlong_penalty": ((*LONG, "algorithm.overlong_tokens=4"), "0.5", by_length(7, 4, 0.5)),
}
"""Settings beside the knob, its value, and the bare functions that give the same advantages."""
OBJECTIVE: dict[str, tuple[tuple[str, ...], str, object]] = {
    "loss": ((), "reinforce", "reinforce"),
    "aggregation": ((), "sequence_mean_token_mean", "sequence_mean_token_mean"),
    "aggregation_length": (("algorithm.aggregation=sequence_sum_norm",), "77", 77),
    "clip_low": ((), "0.11", 0.11),
    "clip_high": ((), "0.33", 0.33),
    "clip_dual": ((), "null", None),
    "entropy": ((), "0.01", 0.01),
    "kl_loss": ((), "0.02", 0.02),
    "kl_loss_estimator": (("algorithm.kl_loss=0.1",), "k1", "k1"),
    "value_loss": (GAE, "0.7", 0.7),
    "value_clip": (GAE, "null", None),
}
WEIGHTS: dict[str, tuple[str, importance.ImportanceCorrection]] = {
    "correction": ("sequence", importance.ImportanceCorrection(Correction.sequence, Excess.truncate, 2.0)),
    "correction_mode": ("reject", importance.ImportanceCorrection(Correction.token, Excess.reject, 2.0)),
    "correction_threshold": ("1.25", importance.ImportanceCorrection(Correction.token, Excess.truncate, 1.25)),
}
ELSEWHERE = {"kl_reward", "kl_reward_estimator", "kl_target", "old_logprobs"}
"""Each has a test of its own below."""


def test_every_knob_has_its_test() -> None:
    """A new knob needs a line in one of the tables, or a test of its own."""
    known = {*CREDIT, *OBJECTIVE, *WEIGHTS, *ELSEWHERE}
    assert {field.name for field in fields(AlgorithmConfig)} == known


@pytest.mark.parametrize("knob", CREDIT)
def test_a_knob_of_credit_arrives(made, knob: str) -> None:
    beside, value, bare = CREDIT[knob]
    changed = rows(credited(made(), *beside, f"algorithm.{knob}={value}"), "advantages")
    expected = made()
    bare(expected)
    assert changed == rows(expected, "advantages")
    assert changed != rows(credited(made(), *beside), "advantages"), "and by default it is something else"


def test_no_overlong_zone_without_a_limit(made) -> None:
    plain = rows(credited(made()), "advantages")
    assert rows(credited(made(), "algorithm.overlong_tokens=4"), "advantages") == plain
    assert rows(credited(made(), *LONG), "advantages") == plain


@pytest.mark.parametrize("knob", OBJECTIVE)
def test_a_knob_of_the_loss_arrives(knob: str) -> None:
    beside, value, expected = OBJECTIVE[knob]
    default = getattr(Objective.of(configure(*beside).algorithm), knob)
    arrived = getattr(Objective.of(configure(*beside, f"algorithm.{knob}={value}").algorithm), knob)
    assert getattr(arrived, "value", arrived) == expected and arrived != default
    assert {field.name for field in fields(Objective)} == set(OBJECTIVE)


@pytest.mark.parametrize("knob", WEIGHTS)
def test_a_knob_of_the_correction_arrives(made, knob: str) -> None:
    value, bare = WEIGHTS[knob]
    changed = rows(credited(made(), *LEARNERS, f"algorithm.{knob}={value}"), "weights")
    expected = made()
    importance.correct(expected, bare)
    assert changed == rows(expected, "weights") and changed != rows(credited(made(), *LEARNERS), "weights")


def test_old_logprobs_arrive() -> None:
    assert treatment(configure()).old_logprobs is OldLogprobs.sampler
    chosen = treatment(configure("algorithm.old_logprobs=learner"))
    assert chosen.old_logprobs is OldLogprobs.learner


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_the_penalty_for_kl_arrives_with_its_estimator(made, estimator: str) -> None:
    settings = ("algorithm.kl_reward=0.3", f"algorithm.kl_reward_estimator={estimator}")
    controller = kl.controller(0.3, None)
    found = credited(made(), *settings, controller=controller)
    expected = made()
    kl.penalise(expected, KLEstimator(estimator), 0.3)
    assert rows(found, "kl_penalties") == rows(expected, "kl_penalties")
    with pytest.raises(ValueError, match="needs the controller"):
        credited(made(), *settings)


def test_what_was_measured_moves_the_coefficient(made) -> None:
    """By the controller that a run opens; a fixed one does not move."""
    controller = kl.controller(0.3, 1e-3)
    expected = kl.controller(0.3, 1e-3)
    measured = kl.penalise(made(), KLEstimator.k1, 0.3)
    expected.update(measured.kl, measured.trajectories)
    credited(made(), "algorithm.kl_reward=0.3", "algorithm.kl_target=0.001", controller=controller)
    assert controller.value == expected.value != 0.3
    fixed = kl.controller(0.3, None)
    credited(made(), "algorithm.kl_reward=0.3", controller=fixed)
    assert fixed.value == 0.3


def test_coefficient_and_target_of_kl_arrive_at_the_controller_of_a_run() -> None:
    config = configure(
        "algorithm.kl_reward=0.3", "algorithm.kl_target=0.02", "rollout.tools=[calculate]", "rollout.interaction=null",
        "engine.threads=1",
    )  # fmt: skip
    assert needs_reference(config) and not needs_critic(config)

    async def opened() -> kl.KLController:
        async with open_engines(config, prepare(config, "test", limit=1), lambda text: None) as engines:
            return engines.kl_controller

    controller = asyncio.run(opened())
    assert isinstance(controller, kl.AdaptiveKL) and (controller.value, controller.target) == (0.3, 0.02)


def test_a_horizon_that_is_too_short_is_refused() -> None:
    """The coefficient would become 0 or negative, and never come back."""
    from turnwise.errors import ConfigError

    controller = kl.AdaptiveKL(0.1, 1.0, horizon=2.0)
    with pytest.raises(ConfigError, match=r"horizon of 2\.0 is too short for 10 trajectories"):
        controller.update(0.0, 10)
    assert controller.value == 0.1
    for target, horizon in ((0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)):
        with pytest.raises(ConfigError, match="positive target and horizon"):
            kl.AdaptiveKL(0.1, target, horizon)


def test_scores_are_told_of_new_episodes_only(made) -> None:
    """What the policy of an earlier step got says nothing of this one."""
    sequences = made()
    sequences[1].reused = True
    metrics = assign_credit(sequences, configure(), None, None)
    assert metrics["critic/score/mean"] == metrics["critic/rewards/min"] == 1.0
    sequences = made()
    for sequence in sequences:
        sequence.reused = True
    assert assign_credit(sequences, configure(), None, None)["critic/score/mean"] == 0.625, "unless all are"
