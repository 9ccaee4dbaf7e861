"""One optimisation step: leaving out what has no gradient changes nothing but the time it takes."""

import json

import pytest
import torch
from tiny_recipe import SHAPE

from turnwise.config import LearnerConfig
from turnwise.config.choices import Precision
from turnwise.data.task_config import configure
from turnwise.engines.learners.learner import Who
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.huggingface_folder import config_from_hf
from turnwise.engines.samplers.cpu.threads import REGIMES
from turnwise.errors import TurnwiseError
from turnwise.training import optimise as module
from turnwise.training.optimise import check_logprob_gap, optimise, score
from turnwise.training.sequences import TrainSequence


def learner(temperature: float = 1.0, precision: Precision | None = None) -> LocalLearner:
    small = {**SHAPE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
             "head_dim": 16, "intermediate_size": 48, "vocab_size": 64}  # fmt: skip
    decoder = Decoder.fresh(config_from_hf(json.loads(json.dumps(small))), seed=0)
    return LocalLearner(
        decoder, LearnerConfig(lr=1e-2, precision=precision), temperature=temperature, regime=REGIMES[0]
    )


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
    trained = learner()
    config = configure("algorithm.advantage=grpo", "learner.token_budget=20", *overrides)
    metrics = optimise(trained, sequences(rewards), config, 0)
    return {name: p.detach().clone() for name, p in trained.model.named_parameters()}, metrics


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
    start = {name: p.detach().clone() for name, p in learner().model.named_parameters()}
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
        trained = learner()
        made = sequences([[1.0, 0.0]])
        made[0].trajectory = made[1].trajectory = 0
        made[0].reward = made[1].reward = 1.0
        third = sequences([[0.0]])[0]
        third.trajectory = 1
        config = configure(
            "algorithm.advantage=grpo", "algorithm.loss=gspo", "algorithm.aggregation=sequence_mean_token_mean",
            f"learner.token_budget={budget}", "training.epochs=2",
        )  # fmt: skip
        optimise(trained, [*made, third], config, 0)
        updated.append({name: p.detach().clone() for name, p in trained.model.named_parameters()})
    for name in updated[0]:
        torch.testing.assert_close(updated[0][name], updated[1][name], atol=1e-6, rtol=1e-5)


def test_an_entropy_bonus_keeps_every_sequence() -> None:
    start = {name: p.detach().clone() for name, p in learner().model.named_parameters()}
    found, _ = after([[1.0, 1.0], [0.0, 0.0]], "algorithm.entropy=0.1")
    assert any(not torch.equal(start[name], found[name]) for name in start)


def sampled() -> list[TrainSequence]:
    """Sequences with the log-probs that a float32 sampler of the learner's weights gives them."""
    made = sequences([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    score(learner(), Who.POLICY, made, "old_logprobs", 1000)
    for sequence in made:
        assert sequence.old_logprobs is not None
        sequence.logprobs, sequence.old_logprobs = sequence.old_logprobs, None
    return made


@pytest.mark.parametrize("precision", [None, Precision.bfloat16])
def test_the_logprob_gap_passes_what_rounding_explains_and_nothing_else(precision: Precision | None) -> None:
    same = learner(precision=precision)
    assert check_logprob_gap(same, sampled(), configure(), exact=False).startswith("sampler and learner log-probs ")
    other = learner(temperature=0.8, precision=precision)
    with pytest.raises(TurnwiseError, match="sampler and learner disagree: .* on average"):
        check_logprob_gap(other, sampled(), configure(), exact=False)
    assert "differ by" in check_logprob_gap(other, sampled(), configure("training.max_logprob_gap=1"), exact=False)


def test_one_far_token_does_not_fail_the_logprob_gap_and_a_hundredth_of_them_does() -> None:
    trained = learner()
    config = configure("training.max_logprob_gap=0.02")
    made = [sequence for _ in range(5) for sequence in sampled()]  # 30 of 4 tokens
    made[0].logprobs[2] += 0.3
    assert "the largest 0.3" in check_logprob_gap(trained, made, config, exact=False)
    for sequence in made[:3]:
        sequence.logprobs[3] += 0.3
    with pytest.raises(TurnwiseError, match="the 99th percentile 0.3"):
        check_logprob_gap(trained, made, config, exact=False)


def test_where_both_compute_the_same_any_difference_fails() -> None:
    trained = learner()
    made = sampled()
    score(trained, Who.SAMPLER, made, "old_logprobs", 1000)
    for sequence in made:
        assert sequence.old_logprobs is not None
        sequence.logprobs = sequence.old_logprobs.copy()
    assert "are bitwise equal" in check_logprob_gap(trained, made, configure(), exact=True)
    made[0].logprobs[2] += 1e-7
    with pytest.raises(TurnwiseError, match="no difference, since both are proven to compute the same"):
        check_logprob_gap(trained, made, configure("training.max_logprob_gap=1"), exact=True)


def test_nan_fails_the_logprob_gap() -> None:
    made = sampled()
    made[0].logprobs[2] = float("nan")
    with pytest.raises(TurnwiseError, match="disagree"):
        check_logprob_gap(learner(), made, configure("training.max_logprob_gap=1"), exact=False)


def test_the_gap_is_measured_on_what_the_first_update_computed(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """No forward pass is added, and what later updates computed is not taken for it."""
    calls = []
    real = LocalLearner.accumulate
    monkeypatch.setattr(LocalLearner, "accumulate", lambda *a: calls.append(1) or real(*a))
    monkeypatch.setattr(LocalLearner, "score", lambda *a: pytest.fail("an extra forward pass"))
    made = sequences([[1.0, 0.0], [0.0, 1.0]])
    expected = learner()
    config = configure("algorithm.advantage=grpo", "training.minibatches=2", "training.epochs=2", "learner.lr=0.1")
    metrics = optimise(learner(), made, config, 0)
    assert len(calls) == 4
    monkeypatch.undo()
    first = [sequence for sequence in made if sequence.first_logprobs is not None]
    assert len(first) == 2
    score(expected, Who.POLICY, first, "old_logprobs", 1000)
    for sequence in first:
        assert sequence.gather("first_logprobs") == pytest.approx(sequence.gather("old_logprobs"), abs=1e-5)
        assert sequence.gather("new_logprobs") != pytest.approx(sequence.gather("old_logprobs"), abs=1e-3)
    gaps = [abs(a - b) for s in first for a, b in zip(s.gather("first_logprobs"), s.gather("logprobs"), strict=True)]
    assert metrics["rollout_corr/abs_diff_mean"] == pytest.approx(sum(gaps) / len(gaps))
