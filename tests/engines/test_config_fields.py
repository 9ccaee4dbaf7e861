"""Every field of a config.json is honoured as transformers honours it, refused by name, or cannot change a number."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file

from turnwise.engines.model import attention
from turnwise.engines.model.config_fields import CHECKED, HARMLESS, READ
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.huggingface_folder import ARCHITECTURES, config_from_hf
from turnwise.engines.model.policy_model import ModelInputs
from turnwise.errors import EngineError

CLASSES = {"llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 128,
}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": None}, "qwen2": {}, "qwen3": {},
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = "original_max_position_embeddings"
EVERYWHERE: list[dict[str, Any]] = [
    {"rms_norm_eps": 1e-2}, {"tie_word_embeddings": True}, {"hidden_act": "gelu"}, {"hidden_act": "relu"},
    {"attention_bias": True}, {"mlp_bias": True}, {"head_dim": 16}, {"num_key_value_heads": None},
    {"num_key_value_heads": 1}, {"attention_dropout": 0.5}, {"pretraining_tp": 2}, {"use_cache": False},
    {"initializer_range": 0.5}, {"chunk_size_feed_forward": 4}, {"max_window_layers": 1}, {"is_encoder_decoder": False},
    # Theta, in either place and in both.
    {"rope_theta": 500.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    {"rope_theta": 77.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    {"rope_scaling": {"rope_type": "default", "rope_theta": 500.0}, "rope_theta": 77.0},
    # Kinds of rotary positions, under their old and their new name.
    *({key: {**settings, "rope_theta": 300.0}} for key in ("rope_parameters", "rope_scaling") for settings in (
        {"rope_type": "linear", "factor": 3.0}, {"type": "linear", "factor": 3.0}, {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32}, {**LLAMA3, ORIGINAL: 32}, LLAMA3,
        {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6, ORIGINAL: 32},
        {"rope_type": "default", "partial_rotary_factor": 0.5}, {"rope_type": "default", "mrope_section": [2, 2, 2]},
        {"rope_type": "proportional", "factor": 2.0}, {"rope_type": "linear", "type": "llama3", "factor": 3.0},
        {"rope_type": "default", "factor": 2.0}, {**LLAMA3, "attention_factor": 2.0})),
    # Both names at once: the older one rules.
    {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "rope_parameters": {"rope_type": "default"}},
    {"rope_scaling": {"rope_type": "linear", "factor": 3.0},
     "rope_parameters": {"rope_type": "linear", "factor": 9.0, "rope_theta": 99.0}},
    {"rope_scaling": {**LLAMA3, ORIGINAL: 32}, "rope_parameters": {**LLAMA3, ORIGINAL: 64, "rope_theta": 50.0}},
    {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 9.0}},
    {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "factor": 9.0}, "rope_theta": 123.0},
    # A length that stands outside.
    {ORIGINAL: 16, "rope_scaling": {**LLAMA3, ORIGINAL: 32}}, {ORIGINAL: 16, "rope_scaling": LLAMA3},
    {ORIGINAL: 16, "rope_parameters": {**LLAMA3, ORIGINAL: 32}}, {ORIGINAL: 16},
    {"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 1.0},
    # Who sees whom.
    {"is_causal": True}, {"is_causal": False},
    {"sliding_window": 8}, {"sliding_window": 128}, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    {"layer_types": ["full_attention", "full_attention"]}, {"layer_types": ["sliding_attention", "full_attention"],
     "sliding_window": 8}, {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8,
                            "use_sliding_window": True},
]  # fmt: skip


def reference_logits(folder: Path, raw: dict[str, Any], ids: torch.Tensor) -> torch.Tensor | None:
    """What transformers computes by this very file, with random weights saved beside it; None when it refuses."""
    (folder / "config.json").write_text(json.dumps(raw))
    torch.manual_seed(3)
    try:
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)).eval()
    except StrictDataclassError:
        return None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.normal_(0.8, 0.3)
            else:
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw))
    try:
        with torch.no_grad():
            logits: torch.Tensor = model(ids.unsqueeze(0)).logits[0]
    except (ValueError, TypeError):
        return None
    return logits


def assert_equal_or_refused(folder: Path, raw: dict[str, Any], changed: dict[str, Any]) -> None:
    ids = torch.randint(0, raw["vocab_size"], (96,), generator=torch.Generator().manual_seed(0))
    theirs = reference_logits(folder, raw, ids)
    if theirs is None:
        return  # transformers refuses it as well, by other rules
    try:
        decoder = Decoder.read(folder)
    except EngineError as error:
        inside = [key for value in changed.values() if isinstance(value, dict) for key in value]
        words = [*changed, *inside, *(str(value) for value in changed.values()), "rope type"]
        assert any(word in str(error) for word in words), error
        assert "\n" not in str(error)
        return
    with torch.no_grad():
        ours = decoder.logits(decoder(ModelInputs(ids, torch.arange(96)), attention.packed([96])))
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("changed", EVERYWHERE, ids=lambda changed: json.dumps(changed).replace('"', "")[:90])
@pytest.mark.parametrize("family", CLASSES)
def test_logits_equal_those_of_transformers_or_the_field_is_refused(
    family: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    raw = {"model_type": family, **SMALL, **BASES[family], **changed}
    if raw["num_key_value_heads"] is None and family == "llama":
        raw.pop("num_key_value_heads")  # null and absent mean the same there
    assert_equal_or_refused(tmp_path, raw, changed)


HONOURED: list[dict[str, Any]] = [
    {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "rope_parameters": {"rope_type": "default"}},
    {ORIGINAL: 16, "rope_scaling": {**LLAMA3, ORIGINAL: 32}}, {"rms_norm_eps": 1e-2}, {"rope_theta": 500.0},
    {"rope_parameters": {**LLAMA3, ORIGINAL: 32}}, {"head_dim": 16},
]  # fmt: skip


@pytest.mark.parametrize("changed", HONOURED, ids=lambda changed: json.dumps(changed).replace('"', "")[:90])
def test_what_is_supported_is_not_refused(changed: dict[str, Any]) -> None:
    """Refusing everything would pass the test above."""
    plain = {"model_type": "llama", **SMALL}
    assert config_from_hf({**plain, **changed}) != config_from_hf(plain)


@pytest.mark.parametrize("family", CLASSES)
def test_every_field_of_the_config_class_has_a_place(family: str) -> None:
    config_class = getattr(transformers, CLASSES[family])
    fields = {field.name for field in dataclasses.fields(config_class)} | set(config_class().to_dict())
    homeless = {name for name in fields if not name.startswith("_")} - READ - CHECKED - HARMLESS
    assert homeless == {"is_encoder_decoder"}, "read them, refuse them, or say why they cannot change a number"
    assert not READ & CHECKED and not READ & HARMLESS and not CHECKED & HARMLESS
    assert family in ARCHITECTURES


@pytest.mark.parametrize("family", CLASSES)
def test_the_defaults_are_those_of_the_config_class(family: str) -> None:
    """A file that leaves a field out means what transformers means by that."""
    made = getattr(transformers, CLASSES[family])()
    needed = {key: getattr(made, key) for key in SMALL if key not in ("head_dim", "num_key_value_heads")}
    needed["num_attention_heads"] = 64  # unlike any default of the key and value heads
    window = {"sliding_window": None} if family == "mistral" else {}
    ours = config_from_hf({"model_type": family, **needed, **window})
    theirs = getattr(transformers, CLASSES[family])(**needed, **window)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert (ours.norm_eps, ours.tied) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    "key", ["num_experts", "logit_scale", "per_layer_config", "use_mrope", "final_logit_softcapping"]
)
def test_a_field_nobody_knows_is_refused_when_it_says_something(key: str) -> None:
    plain = {"model_type": "qwen2", **SMALL}
    for nothing in (None, False, "", [], {}):
        assert config_from_hf({**plain, key: nothing}) == config_from_hf(plain)
    for something in (True, 8, 0.5, "on", [1], {"0": {}}):
        with pytest.raises(EngineError, match=key):
            config_from_hf({**plain, key: something})


BROKEN: dict[str, list[Any]] = {
    **{key: [0, -1, 1.5, "8", True, math.nan, [], {}] for key in SMALL},
    "num_hidden_layers": [1_000_000_000, 1e9, 0, None], "rms_norm_eps": [None, 0, -1.0, math.nan, math.inf, "1e-6", True],
    "rope_theta": [None, 0, -1.0, math.nan, math.inf, "1e6", True], "tie_word_embeddings": ["false", 1, 0.0],
    "attention_bias": ["false", 1], "rope_scaling": [["linear"], "linear", 3, {"rope_type": ["linear"]},
        {"rope_type": "linear"}, {"rope_type": "linear", "factor": "2"}, {"rope_type": "linear", "factor": math.nan},
        {"rope_type": "linear", "factor": 0.0}, {**LLAMA3, "high_freq_factor": 1.0}, {**LLAMA3, ORIGINAL: "32"}],
    "eos_token_id": ["</s>", [1, "2"], 1.5, {}], "bos_token_id": ["<s>", [1]], "model_type": [None, [], {}, 3],
    "layer_types": ["full_attention", 3, [3]], "use_sliding_window": ["yes"], ORIGINAL: [],
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BROKEN.items() for value in values])
def test_a_broken_value_is_one_clear_line_at_once(key: str, value: Any, tmp_path: Path) -> None:
    Decoder.fresh(config_from_hf({"model_type": "llama", **SMALL}), 0).save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL, key: value}))
    with pytest.raises(EngineError) as caught:
        Decoder.read(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "3", "null", '"x"', "{", '{"a":', "\x00", "[" * 100_000, '{"a":' * 100_000])
def test_a_file_that_is_no_config_is_one_clear_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(EngineError, match=r"config\.json") as caught:
        Decoder.read(tmp_path)
    assert "\n" not in str(caught.value)


def saved(folder: Path, **changed: Any) -> dict[str, torch.Tensor]:
    Decoder.fresh(config_from_hf({"model_type": "llama", **SMALL, **changed}), 0).save(folder)
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return tensors


def test_a_head_beside_tied_embeddings_must_say_the_same(tmp_path: Path) -> None:
    tensors = saved(tmp_path, tie_word_embeddings=True)
    embeddings = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embeddings.clone()}, tmp_path / "model.safetensors")
    assert torch.equal(Decoder.read(tmp_path).unembed, embeddings)
    for other in (embeddings + 1e-3, embeddings[:-1].clone()):
        save_file({**tensors, "lm_head.weight": other}, tmp_path / "model.safetensors")
        with pytest.raises(EngineError, match=r"lm_head\.weight.*tie_word_embeddings"):
            Decoder.read(tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers_are_named(tmp_path: Path, value: float) -> None:
    tensors = saved(tmp_path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=r"layers\.1\.mlp\.up_proj.*NaN or infinite"):
        Decoder.read(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.bool])
def test_quantised_weights_are_not_taken_for_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = saved(tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({**tensors, name: tensors[name].to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=r"q_proj.*unquantised"):
        Decoder.read(tmp_path)


@pytest.mark.parametrize(
    "weight_map", [{"a": "../model.safetensors"}, {"a": 3}, {"a": ["b"]}, [], "x", {"a": "none.safetensors"}]
)
def test_a_broken_index_is_one_clear_line(tmp_path: Path, weight_map: Any) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(EngineError) as caught:
        Decoder.read(tmp_path)
    assert "\n" not in str(caught.value)
