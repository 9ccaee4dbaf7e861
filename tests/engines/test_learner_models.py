"""One learner for every policy model: native or of transformers, with LoRA or without, packed or not."""

from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import VOCABULARY, build
from batches import batch_of

from turnwise.config import LearnerConfig
from turnwise.engines.learners.critic import Critic
from turnwise.engines.learners.learner import SUPERVISED, Objective, TokenBatch, Who
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.loading import add_lora
from turnwise.engines.model.policy_model import PolicyModel
from turnwise.engines.model.transformers.model import TransformersModel
from turnwise.errors import EngineError

LENGTHS = [12, 30, 9]
INDEX = torch.tensor([*range(4, 11), *range(15, 40), *range(44, 51)])
TOKENS = torch.from_numpy(np.random.default_rng(1).integers(3, VOCABULARY, sum(LENGTHS)))


def given() -> TokenBatch:
    noise, count = np.random.default_rng(2), len(INDEX)
    return batch_of(
        TOKENS, LENGTHS, INDEX, advantages=noise.normal(0, 1, count), old_logprobs=-noise.uniform(1, 5, count),
        ref_logprobs=-noise.uniform(1, 5, count), returns=noise.normal(0, 1, count), values=np.zeros(count),
    )  # fmt: skip


def learner_of(model: PolicyModel, *, lora: bool) -> LocalLearner:
    critic = Critic.copying(model)
    if lora:
        model = add_lora(model, 3, 6.0, 5)
    config = LearnerConfig(lr=1e-3, critic_lr=1e-3)
    return LocalLearner(model, config, temperature=0.9, critic=critic, reference=True, base_model="base")


@pytest.mark.parametrize("kind", ["qwen3_moe", "lfm2"])
@pytest.mark.parametrize("lora", [False, True])
def test_any_model_learns_and_goes_on_from_its_state(kind: str, lora: bool, tmp_path: Path) -> None:
    """Experts, and layers of convolution, whose sequences cannot share a pass."""
    build(kind).save_pretrained(tmp_path / "base")
    learner = learner_of(TransformersModel.read(tmp_path / "base"), lora=lora)
    start = learner.score(given(), Who.POLICY)
    assert np.array_equal(learner.score(given(), Who.REFERENCE), start)
    assert learner.score(given(), Who.CRITIC).tolist() == [0.0] * len(INDEX)
    frozen = {name: p.clone() for name, p in learner.model.named_parameters() if not p.requires_grad}
    assert bool(frozen) == lora
    first = [learner.update([given()], Objective("ppo_clip", kl_loss=0.1)) for _ in range(2)]
    np.testing.assert_allclose(first[0].outputs[0].logprobs, start, atol=1e-5)
    assert np.abs(learner.score(given(), Who.POLICY) - start).max() > 1e-3
    assert np.abs(learner.score(given(), Who.CRITIC)).max() > 1e-3
    np.testing.assert_allclose(learner.score(given(), Who.REFERENCE), start, atol=1e-6)
    assert all(torch.equal(learner.model.get_parameter(name), tensor) for name, tensor in frozen.items())
    learner.save(tmp_path / "state")
    learner.save_policy(tmp_path)
    assert (tmp_path / "policy_adapter").is_dir() == lora
    resumed = learner_of(TransformersModel.read(tmp_path / "base"), lora=lora)
    resumed.load(tmp_path / "state")
    one, two = (some.update([given()], SUPERVISED) for some in (learner, resumed))
    assert one.metrics == two.metrics and resumed.step == learner.step == 3
    with pytest.raises(EngineError, match="proven equal to the sampler's"):
        learner.score(given(), Who.SAMPLER)
    other = learner_of(TransformersModel.read(tmp_path / "base"), lora=not lora)
    with pytest.raises(EngineError, match="of another model: .*lora"):
        other.load(tmp_path / "state")


def test_both_implementations_learn_the_same(tmp_path: Path) -> None:
    build("qwen3").save_pretrained(tmp_path)
    native, theirs = (learner_of(read(tmp_path), lora=False) for read in (Decoder.read, TransformersModel.read))
    for objective in (Objective("ppo_clip", entropy=0.01, kl_loss=0.1), SUPERVISED):
        one, two = native.update([given()], objective), theirs.update([given()], objective)
        assert one.metrics == pytest.approx(two.metrics, rel=1e-3, abs=1e-4)
        np.testing.assert_allclose(one.outputs[0].entropies, two.outputs[0].entropies, atol=1e-3)
    assert native.weights().shapes == theirs.weights().shapes
