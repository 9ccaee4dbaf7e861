"""Config files of either age are read alike, and what the decoder cannot compute is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.huggingface_folder import (
    DecoderConfig,
    Llama3Rope,
    RopeConfig,
    config_from_hf,
    config_to_hf,
    read_config,
)
from turnwise.errors import EngineError

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def test_old_fields_mean_what_they_meant() -> None:
    config = config_from_hf({**BASE, "eos_token_id": [2, 3]})
    assert (config.num_kv_heads, config.head_dim, config.rope.theta, config.tied) == (4, 8, 10000.0, False)
    assert config.eos_token_ids == (2, 3)
    old = {**BASE, "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    new = {**BASE, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}}
    expected = RopeConfig(500000.0, 8.0, Llama3Rope(1.0, 4.0, 64))
    assert config_from_hf(old).rope == config_from_hf(new).rope == expected
    linear = config_from_hf({**BASE, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert linear.rope == RopeConfig(10000.0, 2.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma3"}, ("gemma3", "qwen3")),
        ({"model_type": "qwen3_moe"}, ("qwen3_moe", "llama")),
        ({"hidden_act": "gelu"}, ("gelu", "silu")),
        ({"model_type": "mistral"}, ("sliding_window", "4096")),
        ({"model_type": "qwen2", "use_sliding_window": True}, ("use_sliding_window",)),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"]}, ("sliding_attention", "full_attention")),
        ({"num_local_experts": 8}, ("num_local_experts",)),
        ({"mlp_bias": True}, ("mlp_bias",)),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ("yarn", "llama3")),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ("low_freq_factor",)),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor",)),
        ({"hidden_size": None}, ("hidden_size", "None")),
        ({"num_key_value_heads": 3}, ("4", "3")),
    ],
)
def test_what_is_not_implemented_is_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(EngineError) as caught:
        config_from_hf({**BASE, "max_position_embeddings": 32768, **changes})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_config_survives_the_round_trip(model_type: str) -> None:
    config = DecoderConfig(
        model_type, 64, 32, 48, 2, 4, 2, 16, 128, 1e-5, RopeConfig(5000.0, 2.0, Llama3Rope(1.0, 2.0, 32)),
        tied=True, qkv_bias=model_type == "qwen2", bos_token_id=1, eos_token_ids=(2,), pad_token_id=0,
    )  # fmt: skip
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config, torch.float32)))) == config


def test_folder_faults_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EngineError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    with pytest.raises(EngineError, match=r"no model\.safetensors"):
        Decoder.read(tmp_path)


def test_wrong_tensors_are_named(tmp_path: Path) -> None:
    Decoder.fresh(config_from_hf(BASE), 0).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "model.layers.0.mlp.router.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match="router"):
        Decoder.read(tmp_path)
    save_file({**tensors, "lm_head.weight": torch.ones(63, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=r"lm_head.*\(63, 32\).*\(64, 32\)"):
        Decoder.read(tmp_path)
    save_file({k: v for k, v in tensors.items() if "q_proj" not in k}, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=r"lacks.*q_proj"):
        Decoder.read(tmp_path)


def test_stored_rotary_tables_are_ignored(tmp_path: Path) -> None:
    Decoder.fresh(config_from_hf(BASE), 0).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    stored = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**tensors, **stored}, tmp_path / "model.safetensors")
    assert torch.equal(Decoder.read(tmp_path).embed, tensors["model.embed_tokens.weight"])
