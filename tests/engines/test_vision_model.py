"""Models that see, in one suite over four families: held against plain transformers with the same weights and images."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from seeing import END, IMAGE, KINDS, START, Shown, build, logits, plain_logits, prepared, shown
from transformers import AutoConfig, AutoModelForImageTextToText

from turnwise.config.choices import ModelImplementation
from turnwise.engines.model.image_features import FeatureCache
from turnwise.engines.model.loading import add_lora, choose_implementation, model_facts, read_model
from turnwise.engines.model.policy_model import Features
from turnwise.engines.model.sources import ModelSource
from turnwise.engines.model.vision_model import VisionModel
from turnwise.errors import EngineError
from turnwise.ledger import Media, MediaSpan

PARTS: tuple[int | tuple[int, int], ...] = (5, (16, 16), 3, (32, 16), 4, (20, 40), 6)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str) -> VisionModel:
    """For tests that change nothing."""
    return VisionModel(build(kind))


def test_logits_are_those_of_plain_transformers(kind: str, model: VisionModel) -> None:
    sequence = shown(kind, 1, *PARTS)
    torch.testing.assert_close(logits(model, sequence), plain_logits(kind, build(kind), sequence), atol=1e-4, rtol=1e-4)
    text = shown(kind, 2, 20)
    torch.testing.assert_close(logits(model, text), plain_logits(kind, build(kind), text), atol=1e-4, rtol=1e-4)


def test_an_image_is_seen(kind: str, model: VisionModel) -> None:
    one, other = shown(kind, 1, *PARTS), shown(kind, 1, *PARTS)
    swapped = MediaSpan(prepared(kind, 999), one.media[0].start)
    assert swapped.media.token_ids.tolist() == one.media[0].media.token_ids.tolist()
    other = Shown(one.ids, (swapped, *one.media[1:]))
    before, behind = slice(0, swapped.start), slice(swapped.end, None)
    assert torch.equal(logits(model, one)[before], logits(model, other)[before])
    assert (logits(model, one)[behind] - logits(model, other)[behind]).abs().amax(1).min() > 1e-3


def test_packed_sequences_do_not_see_each_other(kind: str, model: VisionModel) -> None:
    every = [shown(kind, 1, *PARTS), shown(kind, 2, 11), shown(kind, 3, (32, 32), 2)]
    together = logits(model, *every)
    alone = torch.cat([logits(model, one) for one in every])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


def test_positions_do_not_depend_on_what_follows_and_go_on_by_one(kind: str, model: VisionModel) -> None:
    whole = shown(kind, 1, 5, (16, 16), (32, 16), 4, (20, 40), 6)  # two of them side by side
    places = model.positions(whole.ids, whole.media)
    assert places.shape[-1] == len(whole.ids)
    for span in whole.media:
        before = tuple(other for other in whole.media if other.end <= span.start)
        assert (model.positions(whole.ids[: span.start], before) == places[..., : span.start]).all()
        until = (*before, span)
        assert (model.positions(whole.ids[: span.end], until) == places[..., : span.end]).all()
    behind = places[..., whole.media[-1].end :]
    assert (np.diff(behind, axis=-1) == 1).all()
    assert places.ndim == 1 or (behind == behind[0]).all()


def test_an_image_token_that_the_policy_wrote_is_a_token(kind: str, model: VisionModel) -> None:
    shown_once = shown(kind, 1, 5, (16, 16), 3)
    written = Shown(np.concatenate((shown_once.ids, [IMAGE, IMAGE, 7])), shown_once.media)
    found = logits(model, written)
    torch.testing.assert_close(found[: len(shown_once.ids)], logits(model, shown_once), atol=1e-4, rtol=1e-4)
    places = model.positions(written.ids, written.media)
    assert (np.diff(places[..., -4:], axis=-1) == 1).all()
    # Its embedding decides what follows, as that of any token does.
    with torch.no_grad():
        changed = VisionModel(build(kind))
        changed.model.get_input_embeddings().weight[IMAGE] += 1.0
        again = logits(changed, written)
    assert torch.allclose(again[: len(shown_once.ids)], found[: len(shown_once.ids)], atol=1e-4) or kind == "smolvlm"
    assert not torch.allclose(again[-1], found[-1], atol=1e-3)


def test_features_are_computed_once_and_forgotten_with_the_tower(kind: str) -> None:
    model = VisionModel(build(kind))
    media = [prepared(kind, 1), prepared(kind, 2), prepared(kind, 1)]
    first = model.encode_images(media)
    assert model.encoded_images == 2 and first[0] is first[2] and model.encode_images(media[:1])[0] is first[0]
    same = [(name, tensor.clone()) for name, tensor in model.weights()]
    model.load(same)
    assert model.encode_images(media[:1])[0] is first[0], "nothing of the tower has changed"
    tower = {name.removeprefix("model.") for name, _ in model.vision_parameters()}
    model.load((name, tensor + 0.1 if tensor.dim() == 2 else tensor) for name, tensor in same)
    assert (
        not torch.equal(model.encode_images(media[:1])[0].rows, first[0].rows) and model.encoded_images == 3 and tower
    )
    model.train_vision(True)
    assert (
        model.encode_images(media[:1])[0].rows.requires_grad
        and model.encode_images(media[:1])[0] is not model.encode_images(media[:1])[0]
    )


def test_saved_and_loaded_it_is_the_same_model(kind: str, model: VisionModel, tmp_path: Path) -> None:
    sequence = shown(kind, 1, *PARTS)
    model.save(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(model.weight_shapes())
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager")
    torch.testing.assert_close(plain_logits(kind, theirs, sequence), logits(model, sequence), atol=1e-4, rtol=1e-4)
    source = ModelSource("tiny", tmp_path)
    choice = choose_implementation(source, ModelImplementation.auto)
    assert choice.implementation is ModelImplementation.transformers
    facts = model_facts(source, choice)
    assert (facts.vocab_size, facts.layers, facts.context_length) == (96, 2, 512)
    assert facts.vision == sum(parameter.numel() for _, parameter in model.vision_parameters())
    read = read_model(source, choice, torch.float32)
    assert isinstance(read, VisionModel) and read.reads_images
    torch.testing.assert_close(logits(read, sequence), logits(model, sequence), atol=1e-4, rtol=1e-4)
    other = VisionModel(build(kind))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load(model.weights())
    assert torch.equal(logits(other, sequence), logits(model, sequence))


def test_the_tower_is_frozen_unless_it_is_to_be_trained(kind: str) -> None:
    model = VisionModel(build(kind))
    vision = dict(model.vision_parameters())
    assert vision and not any(parameter.requires_grad for parameter in vision.values())
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and trained | set(vision) == {name for name, _ in model.named_parameters()}
    assert not any("vision" in name or "visual" in name for name in trained)
    model.train_vision(True)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_adapter_is_put_on_the_decoder_alone(kind: str) -> None:
    sequence = shown(kind, 1, *PARTS)
    base = logits(VisionModel(build(kind)), sequence)
    model = add_lora(VisionModel(build(kind)), 3, 6.0, 5)
    assert model.reads_images and model.has_adapter
    torch.testing.assert_close(logits(model, sequence), base)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name and "visi" not in name and "visual" not in name for name in trained)
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(0.1)
    assert not torch.allclose(logits(model, sequence), base, atol=1e-2)
    with model.without_adapter():
        torch.testing.assert_close(logits(model, sequence), base)
    merged = VisionModel(build(kind))
    merged.load(model.weights())
    torch.testing.assert_close(logits(merged, sequence), logits(model, sequence), atol=1e-3, rtol=1e-3)


def test_what_does_not_fit_the_model_is_refused(kind: str, model: VisionModel) -> None:
    good = prepared(kind, 1)
    short = Media("short", b"", good.token_ids, good.takes & (np.cumsum(good.takes) > 1), good.arrays)
    with pytest.raises(EngineError, match="which has"):
        model.encode_images([short])
    odd = Media("odd", b"", good.token_ids, good.takes, {"pixel_values": np.zeros(3, np.float32)})
    with pytest.raises(EngineError, match="cannot read image odd"):
        model.encode_images([odd])


def test_a_family_whose_image_tokens_see_each_other_reads_text_only() -> None:
    text = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "gemma3",
        text_config=text | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
        vision_config=vision | {"image_size": 16, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = VisionModel(AutoModelForImageTextToText.from_config(config).eval())
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    pixels = np.random.default_rng(0).normal(size=(1, 3, 16, 16)).astype(np.float32)
    media = Media("d", b"", np.full(4, IMAGE), np.ones(4, bool), {"pixel_values": pixels})
    with pytest.raises(EngineError, match="image tokens may attend to each other"):
        model.encode_images([media])
    assert logits(model, Shown(np.arange(3, 20), ())).shape == (17, 96)


def test_copies_look_once_until_one_has_another_tower(kind: str) -> None:
    model = VisionModel(build(kind))
    copied = copy.deepcopy(model)
    with torch.inference_mode():  # as a sampler does
        first = model.encode_images([prepared(kind, 1)])[0]
    assert (
        copied.encode_images([prepared(kind, 1)])[0] is first
        and copied.encoded_images == 0
        and not first.rows.is_inference()
    )
    copied.load([(name, tensor + 0.1) for name, tensor in copied.weights()])
    assert not torch.equal(copied.encode_images([prepared(kind, 1)])[0].rows, first.rows)
    assert model.encode_images([prepared(kind, 1)])[0] is first


def test_a_copy_in_another_format_looks_for_itself(kind: str) -> None:
    """Else features had the digits of whoever looked first: sampler or learner, before a run was resumed or after."""
    model = VisionModel(build(kind))
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    assert narrow.encode_images([prepared(kind, 1)])[0].rows.dtype is torch.bfloat16
    alone = VisionModel(build(kind)).encode_images([prepared(kind, 1)])[0].rows
    assert torch.equal(model.encode_images([prepared(kind, 1)])[0].rows, alone)


def test_a_trained_tower_looks_once_in_a_pass(kind: str) -> None:
    model = VisionModel(build(kind))
    model.train_vision(True)
    first, other, again = model.encode_images([prepared(kind, 1), prepared(kind, 2), prepared(kind, 1)])
    assert model.encoded_images == 2 and again is first and other is not first and first.rows.requires_grad


def test_kept_features_have_a_budget() -> None:
    kept = FeatureCache(budget=100)
    rows = [Features(torch.zeros(10, 1), (torch.zeros(2, 1),)) for _ in range(4)]
    for number, one in enumerate(rows):
        kept.put(str(number), one)
        kept.get("0")
    assert [kept.get(str(number)) is not None for number in range(4)] == [True, False, False, True]
    huge = Features(torch.zeros(1000, 1))
    kept.put("huge", huge)
    assert kept.get("huge") is huge and kept.get("0") is None
