"""Preferences: the update is the gradient of the published loss, and the sides of a pair are learned together."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_recipe import SHAPE

from turnwise import configure
from turnwise.config import Config, LearnerConfig, SftConfig
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.huggingface_folder import config_from_hf
from turnwise.errors import ConfigError, DataError
from turnwise.ext.dpo.lesson import Preferences
from turnwise.ledger import Ledger, Origin
from turnwise.training.sequences import TrainSequence
from turnwise.training.sft import learner_config, shuffled
from turnwise.types import Sample, StopReason, Trajectory

BETA = 0.5


def decoder() -> Decoder:
    small = {**SHAPE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
             "head_dim": 16, "intermediate_size": 48, "vocab_size": 64}  # fmt: skip
    return Decoder.fresh(config_from_hf(json.loads(json.dumps(small))), seed=0)


def learner(model: Decoder) -> LocalLearner:
    config = learner_config(LearnerConfig(), SftConfig(lr=1e-2, warmup=1))
    return LocalLearner(model, config, temperature=1.0, updates=40)


def asked(*overrides: str) -> Config:
    return configure("dpo.files=[pairs.jsonl]", f"dpo.beta={BETA}", *overrides)


def episode(number: int, sibling: int, policy: tuple[int, ...]) -> Trajectory:
    """The tokens 1, 2, NUMBER of a prompt, and the policy's."""
    ids = [1, 2, 10 + number, *policy]
    origins = [Origin.PROMPT] * 3 + [Origin.POLICY] * len(policy)
    zeros = np.zeros(len(ids))
    ledger = Ledger.of(ids, origins, zeros, zeros, zeros - 1)
    return Trajectory(
        Sample(f"s{number}", (), "s"), sibling, 0, [], [], [ledger], StopReason.UNKNOWN, 0.0, reward=1.0 - sibling
    )


def pairs(count: int) -> list[Trajectory]:
    return [
        made
        for number in range(count)
        for made in (episode(number, 0, (30, 31 + number, 32)), episode(number, 1, (40,)))
    ]


def of_transformers(model: Decoder, folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model.save(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def likelihood(model: Any, entry: TrainSequence) -> torch.Tensor:
    logprobs = model(torch.tensor(entry.token_ids)[None]).logits[0].log_softmax(-1)
    return torch.stack([logprobs[at - 1, entry.token_ids[at]] for at in entry.policy.tolist()]).sum()


@pytest.mark.parametrize("token_budget", [1000, 6])
def test_an_update_is_the_gradient_of_the_loss_that_torch_computes(token_budget: int, tmp_path: Path) -> None:
    model, lesson = decoder(), Preferences(asked())
    start, mine = of_transformers(model, tmp_path / "start"), learner(model)
    batch = lesson.sequences(pairs(3))
    lesson.prepare(mine, batch, token_budget)
    first = lesson.learn(mine, batch, token_budget)
    assert first.loss == pytest.approx(np.log(2), abs=1e-5) and first.measured["dpo/accuracy"] <= 1
    before = of_transformers(model, tmp_path / "before")
    step = lesson.learn(mine, batch, token_budget)
    gains = [likelihood(before, entry) - likelihood(start, entry).detach() for entry in batch]
    margins = BETA * torch.stack([gains[at] - gains[at + 1] for at in range(0, len(gains), 2)])
    loss = -torch.nn.functional.logsigmoid(margins).mean()
    loss.backward()
    norm = torch.stack([weight.grad.square().sum() for weight in before.parameters() if weight.grad is not None]).sum()
    assert step.loss == pytest.approx(loss.item(), rel=1e-4) and step.loss < first.loss
    assert step.grad_norm == pytest.approx(norm.sqrt().item(), rel=1e-3)
    assert step.measured["dpo/margin"] == pytest.approx(margins.mean().item(), rel=1e-3)


def test_the_chosen_become_likelier_and_the_sides_stay_in_one_batch() -> None:
    mine, lesson = learner(decoder()), Preferences(asked())
    sequences = lesson.sequences(pairs(6))
    lesson.prepare(mine, sequences, None)
    steps = []
    for batch in islice(shuffled(sequences, 25, seed=1), 12):
        assert sorted(entry.trajectory % 2 for entry in batch) == sorted([0, 1] * (len(batch) // 2))
        steps.append(lesson.learn(mine, batch, None))
    assert steps[-1].measured["dpo/accuracy"] == 1.0 and steps[-1].loss < steps[0].loss
    assert steps[-1].metrics()["dpo/margin"] > 0


def test_what_is_no_pair_is_refused() -> None:
    lesson = Preferences(asked())
    with pytest.raises(DataError, match="no pairs of episodes"):
        lesson.sequences(pairs(2)[:3])
    with pytest.raises(DataError, match="no token to learn"):
        lesson.sequences([episode(0, 0, (30,)), episode(0, 1, ())])
    with pytest.raises(ConfigError, match="sft.recorded has no pairs"):
        Preferences(asked("sft.recorded=[runs/first]"))
