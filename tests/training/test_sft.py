"""Supervised fine-tuning: exactly the policy's tokens are learned, and learning happens."""

import json
import math
from dataclasses import replace

import pytest
import torch

from turnwise.config import SftConfig
from turnwise.engines.checkpoint_format import config_from_hf
from turnwise.engines.decoder import Decoder
from turnwise.errors import DataError, TurnwiseError
from turnwise.models.tiny.recipe import SHAPE
from turnwise.training.sequences import TrainSequence, batches, to_sequences
from turnwise.training.sft import loss_on, train_sft
from turnwise.types import Ledger, Message, Origin, Role, Sample, StopReason, Trajectory


def decoder() -> Decoder:
    small = {**SHAPE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
             "head_dim": 16, "intermediate_size": 48, "vocab_size": 64}  # fmt: skip
    return Decoder.fresh(config_from_hf(json.loads(json.dumps(small))), seed=0)


def sequence(ids: tuple[int, ...], policy: tuple[int, ...]) -> TrainSequence:
    return TrainSequence(ids, tuple(index in policy for index in range(len(ids))), (0.0,) * len(ids))


def test_the_loss_is_the_mean_over_policy_tokens_of_the_transformers_model(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from transformers import AutoModelForCausalLM

    model = decoder()
    model.save(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    batch = [sequence((5, 6, 7, 8, 9, 10), (2, 3, 5)), sequence((1, 2, 3), (1,))]
    expected = []
    for entry in batch:
        logprobs = reference(torch.tensor([entry.token_ids])).logits[0].log_softmax(-1)
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
    steps: list[int] = []
    first = train_sft(decoder(), data, config, seed=1, report=lambda step, loss: steps.append(step))
    assert first[-1] < 0.6 * first[0] and steps == list(range(40))
    assert train_sft(decoder(), data, config, seed=1, report=lambda step, loss: None) == first


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    model = decoder()
    with torch.no_grad():
        model.embed.fill_(math.nan)
    with pytest.raises(TurnwiseError, match="nan at step 0"):
        train_sft(model, [sequence((1, 2), (1,))], SftConfig(steps=1), seed=0, report=lambda step, loss: None)


def test_nothing_to_learn_from_is_an_error() -> None:
    for data in ([], [sequence((1, 2), (0, 1))]):
        with pytest.raises(DataError):
            train_sft(decoder(), data, SftConfig(steps=1), seed=0, report=lambda step, loss: None)


def test_sequences_are_the_recorded_tokens_with_the_policys_mask() -> None:
    ledger = Ledger()
    ledger.append([5, 6], Origin.PROMPT, 0)
    ledger.append([7, 8], Origin.POLICY, 0, [-0.5, -0.25])
    ledger.append([9], Origin.TOOL, 0)
    ledger.append([10], Origin.POLICY, 1, [-1.0])
    silent = Ledger()
    silent.append([1], Origin.PROMPT, 0)
    sample = Sample("s", (Message(Role.USER, "x"),), "d")
    trajectory = Trajectory(sample, 0, 0, [], [], [ledger, silent], StopReason.ANSWERED, 0.0)
    (made,) = to_sequences([trajectory])
    assert made.token_ids == (5, 6, 7, 8, 9, 10)
    assert made.loss_mask == (False, False, True, True, False, True)
    assert made.logprobs == (0.0, 0.0, -0.5, -0.25, 0.0, -1.0)
    with pytest.raises(ValueError, match="differ in length"):
        replace(made, logprobs=(0.0,))


def test_batches_keep_the_order_and_the_budget() -> None:
    data = [sequence(tuple(range(1, n + 2)), (n,)) for n in (3, 5, 2, 9, 1)]
    made = list(batches(data, [4, 0, 1, 2, 3], token_budget=8))
    assert [len(s.token_ids) for batch in made for s in batch] == [2, 4, 6, 3, 10]
    assert all(sum(len(s.token_ids) for s in batch) <= 8 or len(batch) == 1 for batch in made)
