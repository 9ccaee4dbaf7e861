"""The fused decoder against the plain one: logits, gradients, continued from pages, shared and saved weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paged import Pages, continued
from torch import Tensor

from turnwise.engines.model.attention import packed, positions
from turnwise.engines.model.decoder import ROPE_CHUNK, Decoder
from turnwise.engines.model.fused_decoder import FusedAttend, FusedDecoder, FusedLoraDecoder
from turnwise.engines.model.huggingface_folder import DecoderConfig, Llama3Rope, RopeConfig
from turnwise.engines.model.lora import LoraDecoder
from turnwise.engines.model.packed_attention import PackedAttend, attend_for
from turnwise.engines.model.policy_model import ModelInputs, PolicyModel
from turnwise.errors import EngineError

CPU = torch.device("cpu")
LLAMA = DecoderConfig("llama", 96, 48, 80, 3, 6, 2, 8, 256, rope=RopeConfig(1000.0, 8.0, Llama3Rope(1.0, 4.0, 32)))
CONFIGS = {
    "llama3-rope": LLAMA,
    "llama-tied": replace(LLAMA, rope=RopeConfig(), tied=True),
    "llama-biased": replace(LLAMA, rope=RopeConfig(5000.0, 2.0), qkv_bias=True, output_bias=True),
    "qwen2": replace(LLAMA, model_type="qwen2", qkv_bias=True, num_kv_heads=6),
    "qwen3": replace(LLAMA, model_type="qwen3", head_dim=10, num_kv_heads=1, tied=True),
}
LENGTHS = (37, 1, 24)
TOKENS = torch.randint(96, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
INPUTS = ModelInputs(TOKENS, positions(LENGTHS))
ROWS = torch.tensor([3, 36, 37, 40, 61])


def decoder_of(config: DecoderConfig, seed: int = 1, wide: float = 5.0) -> Decoder:
    """Weights large enough for every part to show in the logits; norms and biases off the values that hide them."""
    model = Decoder.fresh(config, seed)
    noise = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            shift = 0.2 * torch.empty(parameter.shape).normal_(generator=noise)
            parameter.copy_(parameter * wide if parameter.dim() == 2 else parameter + shift)
    return model


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest) -> tuple[Decoder, FusedDecoder]:
    plain = decoder_of(CONFIGS[request.param])
    return plain, FusedDecoder.of(plain, device=CPU, dtype=torch.float32)


def gradients(model: PolicyModel, attend: object, recompute: int = 0) -> dict[str, Tensor]:
    model.zero_grad()
    hidden = model(INPUTS, attend, rows=ROWS - 1, recompute=recompute)
    logprobs, entropies = model.scores(hidden, TOKENS[ROWS], temperature=0.8, chunk=3)
    (logprobs.sum() + 0.3 * entropies.sum()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_logits_are_those_of_the_plain_decoder(pair: tuple[Decoder, FusedDecoder]) -> None:
    plain, fused = pair
    with torch.no_grad():
        expected = plain.logits(plain(INPUTS, packed(LENGTHS)))
        for attend in (packed(LENGTHS), PackedAttend(LENGTHS, CPU, invariant=False)):
            torch.testing.assert_close(fused.logits(fused(INPUTS, attend)), expected, rtol=1e-4, atol=1e-4)
        some = fused.logits(fused(INPUTS, packed(LENGTHS), rows=ROWS))
        torch.testing.assert_close(some, expected[ROWS], rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.5


def test_gradients_are_those_of_the_plain_decoder_whatever_is_recomputed(pair: tuple[Decoder, FusedDecoder]) -> None:
    plain, _ = pair
    expected = gradients(plain, packed(LENGTHS))
    fused = FusedDecoder(plain.config, {name: tensor.clone() for name, tensor in plain.tensors().items()})
    for recompute in (0, 1, True, 99):
        found = gradients(fused, attend_for(LENGTHS, CPU, fused, invariant=False), recompute)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            scale = expected[name].abs().max().item()
            torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-3 * scale, msg=name)


@pytest.mark.parametrize("recompute", [0, 1, 2, True, 99])
def test_recompute_counts_the_leading_layers(recompute: int) -> None:
    calls: list[int] = []
    for model in (decoder_of(LLAMA), FusedDecoder.of(decoder_of(LLAMA), device=CPU, dtype=torch.float32)):
        calls.clear()
        attend = packed(LENGTHS)

        def counted(layer: int, *given: object, attend: object = attend) -> Tensor:
            calls.append(layer)
            return attend(layer, *given)  # type: ignore[operator]

        gradients(model, counted, recompute)
        again = 3 if recompute is True else min(recompute, 3)
        assert [calls.count(layer) for layer in range(3)] == [2] * again + [1] * (3 - again)


def test_a_sequence_continued_from_pages_is_the_whole_one(pair: tuple[Decoder, FusedDecoder]) -> None:
    _, fused = pair
    tokens = TOKENS[:37]
    with torch.no_grad():
        whole = fused(ModelInputs(tokens, torch.arange(37)), packed([37]))
    assert isinstance(Pages(fused, 1, 1, 1), FusedAttend)
    found = continued(fused, tokens, (20, 13, 1, 1, 1, 1), 4)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)


def test_invariant_attention_of_a_learner_has_the_gradient_of_the_fast_one(pair: tuple[Decoder, FusedDecoder]) -> None:
    _, fused = pair
    found, expected = (
        gradients(fused, attend_for(LENGTHS, CPU, fused, invariant=invariant)) for invariant in (True, False)
    )
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-3, msg=name)


def test_weights_are_shared_loaded_and_saved_as_they_are(tmp_path: Path) -> None:
    plain = decoder_of(CONFIGS["qwen3"])
    narrow = FusedDecoder.of(plain, device=CPU, dtype=torch.bfloat16, invariant=True)
    twin = FusedDecoder.sharing(narrow)
    assert twin.invariant and twin.tensors()["embed"].data_ptr() == narrow.tensors()["embed"].data_ptr()
    assert narrow.tensors()["embed"].data_ptr() != plain.tensors()["embed"].data_ptr()
    before = narrow.embed._version
    twin.load(narrow.weights())
    assert narrow.embed._version == before, "the same memory is not copied onto itself"
    other = decoder_of(CONFIGS["qwen3"], seed=8)
    twin.load(other.weights())
    assert torch.equal(narrow.layers[1].qkv, other.layers[1].qkv.bfloat16())
    assert narrow.weight_shapes() == plain.weight_shapes()
    narrow.save(tmp_path)
    assert '"dtype": "bfloat16"' in (tmp_path / "config.json").read_text()
    again = Decoder.read(tmp_path, torch.bfloat16)
    for name, tensor in narrow.tensors().items():
        assert torch.equal(again.tensors()[name], tensor), name


def test_an_adapter_is_taken_over_and_merged_for_a_sampler() -> None:
    plain = LoraDecoder(decoder_of(LLAMA), rank=2, alpha=4.0, seed=5, targets=("q_proj", "down_proj"))
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.endswith("_B"):
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    fused = FusedDecoder.of(plain, device=CPU, dtype=torch.float32)
    assert isinstance(fused, FusedLoraDecoder) and fused.facts == plain.facts
    expected = gradients(plain, packed(LENGTHS))
    found = gradients(fused, PackedAttend(LENGTHS, CPU, invariant=False), recompute=2)
    assert found.keys() == expected.keys() and len(found) == 12
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-3, msg=name)
    sampler = FusedDecoder.sharing(fused)
    assert sampler.embed.data_ptr() == fused.embed.data_ptr()
    with torch.no_grad():
        hidden, merged = (model(INPUTS, packed(LENGTHS)) for model in (fused, sampler))
    torch.testing.assert_close(merged, hidden, rtol=1e-4, atol=1e-4)


def test_tables_of_positions_grow_and_earlier_ones_stay_for_graphs() -> None:
    model = FusedDecoder.of(decoder_of(LLAMA), device=CPU, dtype=torch.float32)
    model.prepare(10)
    first = model._tables[-1]
    model.prepare(ROPE_CHUNK)
    assert len(model._tables) == 1 and first[0].shape == (ROPE_CHUNK, 4)
    model.prepare(ROPE_CHUNK + 1)
    assert model._tables[0] is first and len(model._tables[-1][0]) == 2 * ROPE_CHUNK
    assert torch.equal(model._tables[-1][1][:ROPE_CHUNK], first[1])
    with pytest.raises(EngineError, match="prepare"):
        model(ModelInputs(TOKENS.to("meta"), torch.arange(3, device="meta")), packed([3]))
