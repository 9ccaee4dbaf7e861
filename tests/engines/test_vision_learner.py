"""Learning with images: packed is single, the tower stays as it is unless it is to be trained, text models refuse."""

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import build as build_text
from batches import batch_of
from seeing import KINDS, Shown, build, plain_logits, prepared, shown

from turnwise.config import LearnerConfig
from turnwise.config.choices import ModelImplementation, Precision
from turnwise.engines.learners.critic import Critic
from turnwise.engines.learners.learner import SUPERVISED, Objective, TokenBatch, Who
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.learners.splitting import halves, whole
from turnwise.engines.model.loading import add_lora
from turnwise.engines.model.sources import ModelSource
from turnwise.engines.model.transformers.model import TransformersModel
from turnwise.engines.model.vision_model import VisionModel
from turnwise.errors import EngineError
from turnwise.ext.fsdp.learner import ShardedLearner
from turnwise.ext.fsdp.rank_group import LocalRanks
from turnwise.ext.fsdp.rank_setup import RankSetup
from turnwise.ext.ray.messages import own_arrays
from turnwise.ledger import MediaSpan, check_places

GRPO = Objective("ppo_clip")
TEMPERATURE = 0.9


def sequences(kind: str) -> list[Shown]:
    """With three images, with none, and with one that stands in two of them."""
    three = shown(kind, 1, 5, (16, 16), 3, (32, 16), 4, (20, 40), 6)
    again = Shown(np.concatenate((three.ids[3 : three.media[0].end], [7, 8, 9, 10])), (three.media[0].shifted(-3),))
    return [three, shown(kind, 2, 13), again]


def packed(every: list[Shown], *, answers: int = 4, **arrays: object) -> TokenBatch:
    """The last tokens of each are the policy's."""
    lengths = [len(one.ids) for one in every]
    starts = np.cumsum([0, *lengths[:-1]])
    ends = np.cumsum(lengths)
    index = np.concatenate([np.arange(end - answers, end) for end in ends])
    tokens = torch.from_numpy(np.concatenate([one.ids for one in every]))
    batch = batch_of(tokens, lengths, torch.from_numpy(index), **arrays)
    spans = [span.shifted(int(start)) for one, start in zip(every, starts, strict=True) for span in one.media]
    return replace(batch, media=tuple(spans))


def scored(kind: str, given: list[Shown]) -> np.ndarray:
    """Log-probs by plain transformers, each sequence by itself."""
    plain, found = build(kind), []
    for one in given:
        logp = torch.log_softmax(plain_logits(kind, plain, one) / TEMPERATURE, -1)[-5:-1]
        found.append(logp.gather(1, torch.from_numpy(one.ids[-4:])[:, None])[:, 0])
    return torch.cat(found).numpy()


def learner_of(kind: str, *, lora: bool = False, train_vision: bool = False, critic: bool = True) -> LocalLearner:
    model = VisionModel(build(kind))
    model.train_vision(train_vision)
    value = Critic.copying(model) if critic else None
    trained = add_lora(model, 3, 6.0, 5) if lora else model
    config = LearnerConfig(lr=1e-3, critic_lr=1e-3)
    return LocalLearner(trained, config, temperature=TEMPERATURE, critic=value, reference=True, base_model="base")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_packed_scores_are_those_of_each_sequence_alone(kind: str) -> None:
    learner, given = learner_of(kind), sequences(kind)
    found = learner.score(packed(given), Who.POLICY)
    np.testing.assert_allclose(found, scored(kind, given), atol=1e-4)
    assert isinstance(learner.model, VisionModel) and learner.model.encoded_images == 3, "one stands in two sequences"
    np.testing.assert_allclose(learner.score(packed(given), Who.REFERENCE), found, atol=1e-6)
    assert learner.model.encoded_images == 3
    for part in halves(whole(packed(given))):
        check_places(part.batch.media, part.batch.tokens)
        np.testing.assert_allclose(learner.score(part.batch, Who.POLICY), found[part.places], atol=1e-5)


@pytest.mark.parametrize("lora", [False, True], ids=["all", "lora"])
def test_a_step_of_grpo_moves_towards_what_was_better_and_leaves_the_tower(
    kind: str, lora: bool, tmp_path: Path
) -> None:
    learner, given = learner_of(kind, lora=lora), sequences(kind)
    start = learner.score(packed(given), Who.POLICY)
    advantages = np.repeat([1.0, -1.0, 1.0], 4)
    batch = packed(given, advantages=advantages, old_logprobs=start, returns=advantages, values=np.zeros(12))
    assert isinstance(learner.model, VisionModel)
    tower = {name: p.clone() for name, p in learner.model.vision_parameters()}
    first = learner.update([batch], GRPO)
    np.testing.assert_allclose(first.outputs[0].logprobs, start, atol=1e-5)
    second = learner.update([batch], GRPO)
    assert second.metrics["loss"] < first.metrics["loss"]
    gained = learner.score(batch, Who.POLICY) - start
    assert (gained * advantages).sum() > 0
    np.testing.assert_allclose(learner.score(batch, Who.REFERENCE), start, atol=1e-6)
    assert np.abs(learner.score(batch, Who.CRITIC)).max() > 0
    assert learner.critic is not None and isinstance(learner.critic.trunk, VisionModel)
    for model in (learner.model, learner.critic.trunk):
        assert all(torch.equal(tower[name], p) for name, p in model.vision_parameters() if ".lora_" not in name)
    learner.save(tmp_path)
    again = learner_of(kind, lora=lora)
    again.load(tmp_path)
    np.testing.assert_array_equal(again.score(batch, Who.POLICY), learner.score(batch, Who.POLICY))


def test_fine_tuning_learns_from_images_and_the_tower_only_when_asked_to(kind: str) -> None:
    given = packed(sequences(kind))
    for trained in (False, True):
        learner = learner_of(kind, train_vision=trained, critic=False)
        assert isinstance(learner.model, VisionModel)
        before = {name: p.clone() for name, p in learner.model.vision_parameters()}
        losses = [learner.update([given], SUPERVISED).metrics["loss"] for _ in range(3)]
        assert losses[0] > losses[1] > losses[2]
        moved = [not torch.equal(before[name], p) for name, p in learner.model.vision_parameters()]
        assert any(moved) == trained
        fresh = np.abs(learner.score(given, Who.POLICY) - learner.score(given, Who.POLICY)).max()
        assert fresh == 0.0


def test_layers_computed_again_give_the_same_gradient(kind: str) -> None:
    given = packed(sequences(kind))
    found = []
    for again in (False, True):
        config = LearnerConfig(lr=1e-3, gradient_checkpointing=again)
        learner = LocalLearner(VisionModel(build(kind)), config, temperature=TEMPERATURE)
        found.append(learner.update([given], SUPERVISED).metrics["grad_norm"])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize("trained", [False, True])
def test_narrow_products_are_the_decoder_s_affair(trained: bool) -> None:
    given = packed(sequences("qwen3_vl"))
    config = LearnerConfig(lr=1e-3, precision=Precision.bfloat16, device="cpu")
    model = VisionModel(build("qwen3_vl"))
    model.train_vision(trained)
    learner = LocalLearner(model, config, temperature=TEMPERATURE)
    found = learner.score(given, Who.POLICY)
    np.testing.assert_allclose(found, scored("qwen3_vl", sequences("qwen3_vl")), atol=0.3)
    assert learner.forward.narrow and (
        trained or model.encode_images([given.media[0].media])[0].rows.dtype is torch.float32
    )
    losses = [learner.update([given], SUPERVISED).metrics["loss"] for _ in range(2)]
    assert losses[1] < losses[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("precision", [Precision.float32, Precision.bfloat16])
def test_on_a_gpu_it_is_the_same(kind: str, precision: Precision) -> None:
    given = packed(sequences(kind))
    config = LearnerConfig(lr=1e-3, precision=precision, device="cuda")
    learner = LocalLearner(VisionModel(build(kind)), config, temperature=TEMPERATURE, reference=True)
    expected = scored(kind, sequences(kind))
    for who in (Who.POLICY, Who.REFERENCE):
        apart = np.abs(learner.score(given, who) - expected)
        assert apart.max() < 0.01 if precision is Precision.float32 else np.median(apart) < 0.3
    losses = [learner.update([given], SUPERVISED).metrics["loss"] for _ in range(3)]
    assert losses[0] > losses[-1]
    assert isinstance(learner.model, VisionModel)
    assert {p.dtype for _, p in learner.model.vision_parameters()} == {getattr(torch, precision.value)}


def test_images_that_are_not_where_they_should_be_are_refused() -> None:
    learner, given = learner_of("qwen3_vl", critic=False), packed(sequences("qwen3_vl"))
    first = given.media[0]
    with pytest.raises(EngineError, match="are not those of image"):
        learner.score(replace(given, media=(first.shifted(1),)), Who.POLICY)
    inside = replace(given, index=np.sort(np.append(given.index, first.start)), trajectory=np.r_[0, given.trajectory])
    with pytest.raises(EngineError, match="are not the policy's"):
        learner.score(inside, Who.POLICY)
    tokens = np.concatenate(([5], prepared("qwen3_vl", 1).token_ids, [6]))
    across = batch_of(torch.from_numpy(tokens), [3, 3], torch.tensor([5]))
    with pytest.raises(EngineError, match="begins in one sequence and ends in another"):
        learner.score(replace(across, media=(MediaSpan(prepared("qwen3_vl", 1), 1),)), Who.POLICY)
    text = LocalLearner(TransformersModel(build_text("qwen3")), LearnerConfig(), temperature=1.0)
    with pytest.raises(EngineError, match="reads text only"):
        text.score(given, Who.POLICY)


@pytest.fixture(scope="module")
def ranks() -> Iterator[LocalRanks]:
    made = LocalRanks(["cpu", "cpu"], 1)
    yield made
    made.stop()


@pytest.mark.long  # tests/ext/fsdp compares two processes with one, on text
@pytest.mark.parametrize("context", [1, 2])
def test_over_two_processes_it_is_the_same(context: int, ranks: LocalRanks, tmp_path: Path) -> None:
    kind = "qwen3_vl"
    VisionModel(build(kind)).save(tmp_path / "base")
    given = packed(sequences(kind), advantages=np.repeat([1.0, -1.0, 1.0], 4))
    alone = LocalLearner(VisionModel.read(tmp_path / "base"), LearnerConfig(lr=1e-3), temperature=TEMPERATURE)
    source = ModelSource("tiny", tmp_path / "base")
    setup = RankSetup(source, ModelImplementation.transformers, LearnerConfig(lr=1e-3), TEMPERATURE, 0, context=context)
    learner = ShardedLearner(ranks, replace(setup, picture=prepared(kind, 1)))
    np.testing.assert_allclose(learner.score(given, Who.POLICY), alone.score(given, Who.POLICY), atol=1e-5)
    start = alone.score(given, Who.POLICY)
    batch = replace(given, old_logprobs=start)
    for _ in range(2):
        there, here = learner.update([batch], GRPO), alone.update([batch], GRPO)
        assert there.metrics["loss"] == pytest.approx(here.metrics["loss"], abs=1e-5)
        assert there.metrics["grad_norm"] == pytest.approx(here.metrics["grad_norm"], rel=1e-3)
    other = replace(prepared(kind, 1), token_ids=np.full_like(prepared(kind, 1).token_ids, 5))
    text_only = ShardedLearner(ranks, replace(setup, picture=other))  # of which its own code makes something else
    for work in (lambda: text_only.score(given, Who.POLICY), lambda: text_only.update([batch], GRPO)):
        with pytest.raises(EngineError, match=r"images in this batch: Qwen3VL\w+ cannot read image"):
            work()
    assert np.isfinite(text_only.score(replace(given, media=()), Who.POLICY)).all(), "text it reads all the same"


def test_a_batch_with_images_learns_the_same_after_a_way_to_another_process() -> None:
    learner, given = learner_of("qwen2_5_vl"), sequences("qwen2_5_vl")
    batch = packed([given[0], *[given[2]] * 6])
    sent = pickle.dumps([batch, batch])
    assert len(sent) < 1.5 * len(pickle.dumps([packed([given[0]])]))  # siblings show one image, which goes once
    there, again = map(own_arrays, pickle.loads(sent))
    first = there.media[0].media
    assert first is again.media[0].media and first is there.media[-1].media and first is not batch.media[0].media
    for span in there.media:
        for array in span.media.arrays.values():
            array.flags.writeable = False  # as those of Ray's object store are
    assert np.array_equal(learner.score(batch, Who.POLICY), learner_of("qwen2_5_vl").score(there, Who.POLICY))
