"""Supervised fine-tuning as an objective of the learner: the policy's tokens are learned, and no others."""

import json
import math
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch
from tiny_recipe import SHAPE

from turnwise.config import LearnerConfig, SftConfig
from turnwise.engines.learners.learner import SUPERVISED
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.learners.losses import evaluate
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.huggingface_folder import config_from_hf
from turnwise.errors import DataError, TurnwiseError
from turnwise.training.packing import pack, tokens_by_trajectory
from turnwise.training.sequences import TrainSequence
from turnwise.training.sft import (
    PASSES,
    SftStep,
    check_sequences,
    count_updates,
    fingerprint,
    learn,
    learner_config,
    shuffled,
)

DATA = [((1, 2, 3, 40 + n % 3, 50 + n % 3), (3, 4)) for n in range(30)]


def decoder() -> Decoder:
    small = {**SHAPE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
             "head_dim": 16, "intermediate_size": 48, "vocab_size": 64}  # fmt: skip
    return Decoder.fresh(config_from_hf(json.loads(json.dumps(small))), seed=0)


def learner(model: Decoder | None = None, *, steps: int = 40, **knobs: float) -> LocalLearner:
    config = learner_config(LearnerConfig(), SftConfig(**{"lr": 1e-2, "warmup": 5, **knobs}))  # type: ignore[arg-type]
    return LocalLearner(model or decoder(), config, temperature=1.0, updates=steps)


def sequence(ids: tuple[int, ...], policy: tuple[int, ...], trajectory: int = 0) -> TrainSequence:
    mask, zeros = [n in policy for n in range(len(ids))], [0] * len(ids)
    return TrainSequence(list(ids), mask, [0.0] * len(ids), zeros, 0, trajectory, -1, 0.0)  # type: ignore[arg-type]


def data() -> list[TrainSequence]:
    return [sequence(ids, policy, number) for number, (ids, policy) in enumerate(DATA)]


def test_the_loss_is_the_mean_over_policy_tokens_of_the_transformers_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = decoder()
    model.save(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    batch = [sequence((5, 6, 7, 8, 9, 10), (2, 3, 5)), sequence((1, 2, 3), (1,), 1)]
    expected = []
    for entry in batch:
        logprobs = reference(torch.from_numpy(entry.token_ids)[None]).logits[0].log_softmax(-1)
        expected += [-logprobs[i - 1, entry.token_ids[i]].item() for i, flag in enumerate(entry.loss_mask) if flag]
    step = learn(learner(model), batch, 100)
    assert step.loss == pytest.approx(sum(expected) / len(expected), abs=1e-5)
    assert (step.tokens, step.policy_tokens) == (9, 4)


def gradients(batch: list[TrainSequence]) -> list[torch.Tensor]:
    model = decoder()
    mine = learner(model)
    mine.accumulate(pack(batch, tokens_by_trajectory(batch)), partial(evaluate, objective=SUPERVISED))
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_tokens_of_others_change_nothing_but_their_context() -> None:
    """A reply token that no policy token follows has no part in the gradient; one of the policy's has."""
    short = gradients([sequence((5, 6, 7, 8), (2, 3))])
    longer = gradients([sequence((5, 6, 7, 8, 30, 31, 32), (2, 3))])
    for a, b in zip(short, longer, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
    own = gradients([sequence((5, 6, 7, 8, 30, 31, 32), (2, 3, 4))])
    assert any(not torch.allclose(a, b, atol=1e-6, rtol=1e-4) for a, b in zip(own, longer, strict=True))


def test_a_batch_in_several_parts_has_the_gradient_of_one() -> None:
    batch = data()[:12]
    whole, parts = learner(), learner()
    steps = learn(whole, batch, 1000), learn(parts, batch, 15)
    assert steps[0].loss == pytest.approx(steps[1].loss, abs=1e-6)
    assert steps[0].grad_norm == pytest.approx(steps[1].grad_norm, rel=1e-5)
    assert (steps[0].tokens, steps[0].policy_tokens) == (steps[1].tokens, steps[1].policy_tokens) == (60, 24)


def test_training_learns_is_reproducible_and_decays_to_a_tenth() -> None:
    runs: list[list[SftStep]] = []
    for _ in range(2):
        mine = learner()
        runs.append([learn(mine, batch, 8192) for batch in islice(shuffled(data(), 60, seed=1), 40)])
    first, second = runs
    assert first[-1].loss < 0.6 * first[0].loss
    assert [(s.loss, s.lr, s.grad_norm) for s in second] == [(s.loss, s.lr, s.grad_norm) for s in first]
    for at, step in enumerate(first):
        fallen = 0.1 + 0.45 * (1 + math.cos(math.pi * (at - 5) / 35))
        assert step.lr == pytest.approx(1e-2 * (at + 1) / 5 if at < 5 else 1e-2 * fallen)


def test_batches_hold_the_budget_and_every_pass_all_sequences() -> None:
    sequences = data()
    first = list(islice(shuffled(sequences, 60, seed=1), 3))
    assert [len(batch) for batch in first] == [10, 10, 10], "as few as the budget allows, and no small rest"
    assert sorted(entry.trajectory for batch in first for entry in batch) == list(range(30))
    assert [[s.trajectory for s in b] for b in islice(shuffled(sequences, 60, seed=2), 3)] != [
        [s.trajectory for s in b] for b in first
    ]
    assert count_updates(sequences, SftConfig(batch_tokens=60), 1) == 3 * PASSES
    assert count_updates(sequences, SftConfig(batch_tokens=60, steps=7), 1) == 7
    assert fingerprint(sequences) == fingerprint(data()) != fingerprint(sequences[1:])
    assert fingerprint([sequence((1, 2, 3), (1,))]) != fingerprint([sequence((1, 2, 3), (2,))])


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    model = decoder()
    with torch.no_grad():
        model.embed.fill_(math.nan)
    with pytest.raises(TurnwiseError, match=r"nan after 0 weight updates; lower sft\.lr"):
        learn(learner(model), [sequence((1, 2), (1,))], 100)


def test_nothing_to_learn_from_is_an_error() -> None:
    for sequences in ([], [sequence((1, 2), (0, 1))]):
        with pytest.raises(DataError):
            check_sequences(sequences)
