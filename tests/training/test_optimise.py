"""One optimisation step: leaving out what has no gradient changes nothing but the time it takes."""

import json

import torch

from turnwise.compose import configure
from turnwise.engines.checkpoint_format import config_from_hf
from turnwise.engines.decoder import Decoder
from turnwise.engines.learner import LearnerSettings, TorchLearner
from turnwise.engines.optimizer import OptimizerSettings
from turnwise.models.tiny.recipe import SHAPE
from turnwise.training import optimise as module
from turnwise.training.kl import FixedKL
from turnwise.training.optimise import Mind, optimise
from turnwise.training.sequences import TrainSequence


def learner() -> TorchLearner:
    small = {**SHAPE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
             "head_dim": 16, "intermediate_size": 48, "vocab_size": 64}  # fmt: skip
    decoder = Decoder.fresh(config_from_hf(json.loads(json.dumps(small))), seed=0)
    return TorchLearner(decoder, LearnerSettings(OptimizerSettings(lr=1e-2)), temperature=1.0)


def sequences(rewards: list[list[float]]) -> list[TrainSequence]:
    """Groups of siblings with these rewards; a tool span in the middle of each."""
    made = []
    for group, found in enumerate(rewards):
        for sibling, reward in enumerate(found):
            ids = [1 + group, 2, 10 + sibling, 11, 3, 4, 20 + sibling, 5]
            mask = [False, False, True, True, False, False, True, True]
            logprobs = [-4.0 if flag else 0.0 for flag in mask]
            made.append(TrainSequence(ids, mask, logprobs, [0] * 8, 0, len(made), group, reward))
    return made


def after(rewards: list[list[float]], *overrides: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    mind = Mind(learner(), None, FixedKL(0.0))
    config = configure("algorithm.advantage=grpo", "learner.token_budget=20", *overrides)
    metrics = optimise(mind, sequences(rewards), config, 0, None)
    return {name: p.detach().clone() for name, p in mind.learner.decoder.named_parameters()}, metrics


def test_flat_groups_are_left_out_without_changing_the_update(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    rewards = [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 1.0, 1.0]]
    quick, metrics = after(rewards)
    monkeypatch.setattr(module, "_has_gradient", lambda sequence, config: True)
    slow, slow_metrics = after(rewards)
    for name in slow:
        torch.testing.assert_close(quick[name], slow[name], atol=1e-6, rtol=1e-5)
    assert metrics["actor/grad_norm"] > 0
    assert abs(metrics["actor/pg_loss"] - slow_metrics["actor/pg_loss"]) < 1e-6


def test_a_step_without_any_gradient_changes_no_weight() -> None:
    start = {name: p.detach().clone() for name, p in learner().decoder.named_parameters()}
    found, metrics = after([[1.0, 1.0], [0.0, 0.0]])
    assert all(torch.equal(start[name], found[name]) for name in start)
    assert metrics["actor/grad_norm"] == 0.0 and metrics["critic/score/mean"] == 0.5


def test_the_bounds_of_ratio_and_value_can_be_switched_off() -> None:
    rewards = [[1.0, 0.0, 0.0]]
    bounded, _ = after(rewards, "algorithm.clip_dual=1.0001", "algorithm.clip_low=0.0", "training.epochs=3")
    free, _ = after(rewards, "algorithm.clip_dual=null", "algorithm.clip_low=0.0", "training.epochs=3")
    assert any(not torch.equal(bounded[name], free[name]) for name in free)
    assert configure("algorithm.advantage=gae", "algorithm.value_clip=null").algorithm.value_clip is None


def test_gspo_learns_the_same_from_a_trajectory_in_segments() -> None:
    """Two segments of one trajectory, in a budget that holds only one: its ratio and its weight stay one."""
    updated = []
    for budget in (20, 1000):
        mind = Mind(learner(), None, FixedKL(0.0))
        made = sequences([[1.0, 0.0]])
        made[0].trajectory = made[1].trajectory = 0
        made[0].reward = made[1].reward = 1.0
        third = sequences([[0.0]])[0]
        third.trajectory = 1
        config = configure(
            "algorithm.advantage=grpo", "algorithm.loss=gspo", "algorithm.aggregation=sequence_mean_token_mean",
            f"learner.token_budget={budget}", "training.epochs=2",
        )  # fmt: skip
        optimise(mind, [*made, third], config, 0, None)
        updated.append({name: p.detach().clone() for name, p in mind.learner.decoder.named_parameters()})
    for name in updated[0]:
        torch.testing.assert_close(updated[0][name], updated[1][name], atol=1e-6, rtol=1e-5)


def test_an_entropy_bonus_keeps_every_sequence() -> None:
    start = {name: p.detach().clone() for name, p in learner().decoder.named_parameters()}
    found, _ = after([[1.0, 1.0], [0.0, 0.0]], "algorithm.entropy=0.1")
    assert any(not torch.equal(start[name], found[name]) for name in start)
