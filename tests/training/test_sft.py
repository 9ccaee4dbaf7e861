"""Supervised fine-tuning: exactly the policy's tokens are learned, and learning happens."""

import json
import math

import pytest
import torch

from turnwise.config import SftConfig
from turnwise.engines.model.checkpoint_format import config_from_hf
from turnwise.engines.model.decoder import Decoder
from turnwise.errors import DataError, TurnwiseError
from turnwise.models.tiny.recipe import SHAPE
from turnwise.training.sequences import TrainSequence
from turnwise.training.sft import SftStep, loss_on, train_sft


def decoder() -> Decoder:
    small = {**SHAPE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
             "head_dim": 16, "intermediate_size": 48, "vocab_size": 64}  # fmt: skip
    return Decoder.fresh(config_from_hf(json.loads(json.dumps(small))), seed=0)


def sequence(ids: tuple[int, ...], policy: tuple[int, ...]) -> TrainSequence:
    zeros = [0] * len(ids)
    return TrainSequence(list(ids), [n in policy for n in range(len(ids))], [0.0] * len(ids), zeros, 0, 0, -1, 0.0)


def test_the_loss_is_the_mean_over_policy_tokens_of_the_transformers_model(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from transformers import AutoModelForCausalLM

    model = decoder()
    model.save(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    batch = [sequence((5, 6, 7, 8, 9, 10), (2, 3, 5)), sequence((1, 2, 3), (1,))]
    expected = []
    for entry in batch:
        logprobs = reference(torch.from_numpy(entry.token_ids)[None]).logits[0].log_softmax(-1)
        expected += [-logprobs[i - 1, entry.token_ids[i]].item() for i, flag in enumerate(entry.loss_mask) if flag]
    assert loss_on(model, batch).item() == pytest.approx(sum(expected) / len(expected), abs=1e-5)


def test_tokens_of_others_change_nothing_but_their_context() -> None:
    """A reply token that no policy token follows has no part in the loss or the gradient."""
    model = decoder()
    short, longer = sequence((5, 6, 7, 8), (2, 3)), sequence((5, 6, 7, 8, 30, 31, 32), (2, 3))
    gradients = []
    for batch in ([short], [longer]):
        model.zero_grad()
        loss_on(model, batch).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_training_learns_and_is_reproducible() -> None:
    data = [sequence((1, 2, 3, 40 + n % 3, 50 + n % 3), (3, 4)) for n in range(30)]
    config = SftConfig(steps=40, batch_tokens=60, lr=1e-2, warmup=5)
    runs: list[list[SftStep]] = []
    for _ in range(2):
        runs.append([])
        assert train_sft(decoder(), data, config, seed=1, report=runs[-1].append) == pytest.approx(
            13.4
        )  # 12, 12 and 6 sequences a pass
    first, second = runs
    assert [step.number for step in first] == list(range(1, 41)) and first[-1].loss < 0.6 * first[0].loss
    assert [(s.loss, s.lr, s.grad_norm) for s in second] == [(s.loss, s.lr, s.grad_norm) for s in first]
    assert first[0].lr == pytest.approx(1e-2 / 5) and first[4].lr == pytest.approx(1e-2)
    assert 0 < first[-1].lr < first[4].lr
    assert first[0].grad_norm > 0 and (first[0].tokens, first[0].policy_tokens) == (60, 24)


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    model = decoder()
    with torch.no_grad():
        model.embed.fill_(math.nan)
    with pytest.raises(TurnwiseError, match="nan at step 1"):
        train_sft(model, [sequence((1, 2), (1,))], SftConfig(steps=1), seed=0, report=lambda step: None)


def test_nothing_to_learn_from_is_an_error() -> None:
    for data in ([], [sequence((1, 2), (0, 1))]):
        with pytest.raises(DataError):
            train_sft(decoder(), data, SftConfig(steps=1), seed=0, report=lambda step: None)
