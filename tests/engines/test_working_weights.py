"""bfloat16 weights to compute with and float32 masters behind them: no step is lost, no state, and no micro-batch."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import batch_of
from torch import Tensor
from torch.nn import functional

from turnwise.config import LearnerConfig
from turnwise.config.choices import Offload, OptimizerName, Precision
from turnwise.engines.learners.critic import Critic
from turnwise.engines.learners.learner import SUPERVISED, Objective, TokenBatch, Who
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.learners.splitting import halves, whole
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.lora import LoraDecoder
from turnwise.errors import EngineError

LENGTHS = [19, 7, 33, 12]
PPO = Objective("ppo_clip", entropy=0.01)


def learner_of(
    decoder: Decoder, dtype: torch.dtype = torch.bfloat16, critic: bool = False, **knobs: Any
) -> LocalLearner:
    given = {name: knobs.pop(name) for name in ("warn", "reference") if name in knobs}
    policy = Decoder(decoder.config, {name: tensor.clone() for name, tensor in decoder.tensors().items()})
    config = LearnerConfig(**{"lr": 1e-3, "critic_lr": 1e-3, "device": "cpu", **knobs})
    own = Critic.copying(policy) if critic else None
    return LocalLearner(policy, config, temperature=0.9, critic=own, working=dtype, **given)


def batch(lengths: list[int] = LENGTHS, seed: int = 0) -> TokenBatch:
    noise = np.random.default_rng(seed)
    tokens = torch.tensor(noise.integers(96, size=sum(lengths)))
    starts = np.cumsum(lengths) - lengths
    index = torch.tensor([s + i for s, n in zip(starts, lengths, strict=True) for i in range(2, n) if i % 5])
    count = len(index)
    return batch_of(
        tokens, lengths, index, advantages=noise.normal(0, 1, count), old_logprobs=-noise.uniform(1, 5, count),
        returns=noise.normal(0, 1, count), values=noise.normal(0, 1, count),
    )  # fmt: skip


def parts_of(given: TokenBatch) -> list[TokenBatch]:
    return [part.batch for part in halves(whole(given))]


def masters(learner: LocalLearner) -> dict[str, Tensor]:
    return {name: t for name, t in learner.state()[0].items() if not name.startswith("optimizer.")}


def test_updates_are_nearly_those_of_float32_and_weights_are_the_masters_rounded(decoder: Decoder) -> None:
    narrow, wide = learner_of(decoder, critic=True), learner_of(decoder, torch.float32, critic=True)
    start = masters(wide)
    assert all(torch.equal(tensor, start[name]) for name, tensor in masters(narrow).items()), "no digit is lost"
    before = {name: tensor.clone() for name, tensor in start.items()}
    for seed in range(6):
        found, expected = (one.update([batch(seed=seed)], PPO) for one in (narrow, wide))
        assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=0.05, abs=0.02)
        assert found.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=0.3)
    moved = [torch.cat([(masters(one)[name] - before[name]).flatten() for name in before]) for one in (narrow, wide)]
    assert functional.cosine_similarity(moved[0], moved[1], dim=0) > 0.9
    weights = dict(narrow.model.named_parameters())
    assert {p.dtype for p in weights.values()} == {torch.bfloat16}
    for name, parameter in weights.items():
        assert torch.equal(parameter, masters(narrow)[f"policy.{name}"].bfloat16())
    assert {tensor.dtype for _, tensor in narrow.weights().tensors} == {torch.bfloat16}
    assert narrow.critic is not None and narrow.critic.weight.dtype == torch.float32
    assert next(narrow.critic.trunk.parameters()).dtype == torch.bfloat16


def test_steps_far_below_a_weights_last_digit_add_up(decoder: Decoder) -> None:
    learner = learner_of(decoder, lr=1e-6)
    before, optimizer = masters(learner)["policy.embed"].clone(), learner._optimizers["policy"]
    working = learner.model.get_parameter("embed")
    for step in range(1000):
        working.grad = torch.ones_like(working)
        optimizer.update(step, 1.0)
    moved = before - masters(learner)["policy.embed"]
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-3), rtol=0.02, atol=0)
    assert torch.equal(working, masters(learner)["policy.embed"].bfloat16())
    assert not torch.equal(working, before.bfloat16())


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "offload"])
def test_four_steps_are_two_and_two(decoder: Decoder, kind: str, tmp_path: Path) -> None:
    knobs = {
        "adamw8bit": {"optimizer": OptimizerName.adamw8bit}, "offload": {"offload": Offload.optimizer}
    }.get(kind, {})  # fmt: skip
    straight, first, second = (learner_of(decoder, critic=True, **knobs) for _ in range(3))
    expected = [straight.update([batch(seed=seed)], PPO).metrics for seed in range(4)]
    got = [first.update([batch(seed=seed)], PPO).metrics for seed in range(2)]
    first.save(tmp_path)
    second.update([batch(seed=9)], PPO)  # what it did before must leave no trace
    second.load(tmp_path)
    got += [second.update([batch(seed=seed)], PPO).metrics for seed in range(2, 4)]
    assert got == expected
    ends = straight.state()[0], second.state()[0]
    assert ends[0].keys() == ends[1].keys() and all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_state_moves_between_precisions_and_optimizers_are_told_apart(decoder: Decoder) -> None:
    narrow, wide = learner_of(decoder), learner_of(decoder, torch.float32)
    narrow.update([batch()], PPO)
    wide.load_state(*narrow.state())
    for name, tensor in masters(wide).items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, masters(narrow)[name])
    again = learner_of(decoder)
    again.load_state(*wide.state())
    assert np.array_equal(again.score(batch(), Who.POLICY), narrow.score(batch(), Who.POLICY))
    eight = learner_of(decoder, optimizer=OptimizerName.adamw8bit)
    with pytest.raises(EngineError, match="of learner.optimizer=adamw, which learner.optimizer=adamw8bit cannot read"):
        eight.load_state(*narrow.state())
    eight.update([batch()], PPO)
    with pytest.raises(EngineError, match="of learner.optimizer=adamw8bit, which"):
        narrow.load_state(*eight.state())
    old = {key: value for key, value in wide.state()[1].items() if key != "optimizer"}  # before there was a choice
    narrow.load_state(wide.state()[0], old)


def test_micro_batches_add_up_in_float32(decoder: Decoder) -> None:
    given = batch([30] * 16)
    parts = [part for half in parts_of(given) for quarter in parts_of(half) for part in parts_of(quarter)]
    assert len(parts) == 8
    whole_norm, wide_norm = (
        learner_of(decoder, dtype, grad_clip=math.inf).update([given], SUPERVISED).metrics["grad_norm"]
        for dtype in (torch.bfloat16, torch.float32)
    )
    learner = learner_of(decoder, grad_clip=math.inf)
    found = learner.update(parts, SUPERVISED)
    assert found.metrics["grad_norm"] == pytest.approx(wide_norm, rel=0.02) == pytest.approx(whole_norm, rel=0.04)
    assert [len(one.logprobs) for one in found.outputs] == [len(part.index) for part in parts]
    gradients = learner._optimizers["policy"].gradients
    for part in parts[:2]:
        learner.accumulate(part, lambda tokens, here: (tokens.logprobs.sum(), {}))
    assert {gradient.dtype for gradient in gradients.total().values()} == {torch.float32}
    with pytest.raises(EngineError, match="gradients that no step has used yet"):
        learner.state()


def test_autocast_stays_for_adapters_and_narrow_weights_need_masters(decoder: Decoder) -> None:
    config = LearnerConfig(device="cpu", precision=Precision.bfloat16)
    adapted = LoraDecoder(Decoder(decoder.config, decoder.tensors()), rank=2, alpha=4.0, seed=0)
    learner = LocalLearner(adapted, config, temperature=1.0)
    assert learner.forward.narrow and {p.dtype for p in learner.model.parameters()} == {torch.float32}
    half = Decoder(decoder.config, {name: tensor.bfloat16() for name, tensor in decoder.tensors().items()})
    with pytest.raises(EngineError, match="load what is trained as float32"):
        LocalLearner(half, config, temperature=1.0)
    trained = LocalLearner(half, config, temperature=1.0, working=torch.bfloat16, reference=True)
    start = trained.score(batch(), Who.REFERENCE)
    trained.update([batch()], PPO)
    assert np.array_equal(trained.score(batch(), Who.REFERENCE), start) and not trained.forward.narrow
    assert not np.array_equal(trained.score(batch(), Who.POLICY), start)
