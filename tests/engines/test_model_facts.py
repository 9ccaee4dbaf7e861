"""What is known of a model before its weights are read holds for every architecture, and what cannot run says why."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import HYBRID, SUPPORTED, build

from turnwise.config.choices import ModelImplementation as Wanted
from turnwise.engines.model.loading import ModelFacts, choose_implementation, model_facts, read_model
from turnwise.engines.model.sources import ModelSource, find_model
from turnwise.engines.model.transformers.model import TransformersModel
from turnwise.errors import EngineError

GEMMA4 = SUPPORTED["gemma4_text"]
BY_LAYER: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4 as released": ("gemma4_text", {"num_global_key_value_heads": 1, "attention_k_eq_v": True}),
    "gemma4 that shares caches": ("gemma4_text", {"num_kv_shared_layers": 1}),
    "gemma4_unified": ("gemma4_unified_text", GEMMA4),
}
"""Configs with other values in some layers."""
CASES = {**{kind: (kind, {}) for kind in (*SUPPORTED, *HYBRID)}, **BY_LAYER}


def folder_of(case: str, place: Path) -> ModelSource:
    kind, changes = CASES[case]
    build(kind, **changes).save_pretrained(place / "model")
    return ModelSource(case, place / "model")


@pytest.mark.parametrize("case", CASES)
def test_the_facts_are_those_of_the_loaded_model(case: str, tmp_path: Path) -> None:
    source = folder_of(case, tmp_path)
    choice = choose_implementation(source, Wanted.transformers)
    facts = model_facts(source, choice)
    assert not [notice for notice in choice.notices if "per_layer_config" in notice or "global_head_dim" in notice]
    shape = read_model(source, choice, torch.float32).shape
    assert (facts.vocab_size, facts.context_length, facts.hidden_size) == (
        shape.vocab_size, shape.context_length, shape.hidden_size,
    )  # fmt: skip
    kept = sum(cache.kv_heads * (cache.key_dim + cache.value_dim) for cache in shape.caches)
    assert facts.cached_numbers is not None and facts.cached_numbers >= kept
    if case not in HYBRID:  # which have layers without keys and values
        assert facts.cached_numbers == kept


def test_every_layer_counts_with_its_own_heads(tmp_path: Path) -> None:
    """Two heads of 8 in a layer that slides, one of 16 in each of those that see all."""
    facts = _facts("gemma4 as released", tmp_path)
    assert facts.cached_numbers == 2 * (8 + 8) + 2 * (16 + 16)


def _facts(case: str, place: Path) -> ModelFacts:
    source = folder_of(case, place)
    return model_facts(source, choose_implementation(source, Wanted.auto))


def test_layers_that_differ_are_not_taken_for_a_plain_llama(tmp_path: Path) -> None:
    """transformers has no class that computes it; what is known of it is known, and reading it says why not."""
    build("llama").save_pretrained(tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    given["per_layer_config"] = {"1": {"num_key_value_heads": 1}}
    (tmp_path / "config.json").write_text(json.dumps(given))
    source = ModelSource("uneven", tmp_path)
    choice = choose_implementation(source, Wanted.auto)
    assert choice.implementation is Wanted.transformers and "per_layer_config" in choice.reason
    assert model_facts(source, choice).cached_numbers == (2 + 1) * (8 + 8)
    with pytest.raises(EngineError, match="values for single layers .* that its class does not read"):
        read_model(source, choice, torch.float32)


INDEXED = SUPPORTED["deepseek_v3"] | {"index_n_heads": 4, "index_head_dim": 8, "index_topk": 6}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "falcon": ({}, "its class takes attention from a list of its own"),
    "gptj": ({"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, "takes attention from a list of its own"),
    "deepseek_v32": (INDEXED, "DeepseekV32ForCausalLM works on the attention mask in its own layers"),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2}, "Mpt.* attends by code of its own"),
    "bloom": ({}, "Bloom.* attends by code of its own"),
    "deepseek_v4": ({}, "heavily_compressed_attention layers attend to keys made of several tokens"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_run_is_refused_in_words(kind: str, tmp_path: Path) -> None:
    changes, words = REFUSED[kind]
    build(kind, **changes).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=words) as refused:
        TransformersModel.read(tmp_path)
    assert "\n" not in str(refused.value) and not str(refused.value).endswith("'turnwise'")


def test_keys_made_of_several_tokens_are_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    build("deepseek_v4").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    source = ModelSource("v4", tmp_path)
    with pytest.raises(EngineError, match="keys made of several tokens"):
        model_facts(source, choose_implementation(source, Wanted.auto))


def test_a_config_that_transformers_itself_cannot_run_is_told_from_one_that_ours_cannot(tmp_path: Path) -> None:
    kind, heads = "qwen3_moe", {"num_experts": 2, "num_experts_per_tok": 3}
    build(kind, **heads).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="transformers cannot run Qwen3MoeForCausalLM as config.json describes it"):
        TransformersModel.read(tmp_path)


def test_check_passes_for_gemma4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from turnwise.commands.cli import main

    folder = tmp_path / "g4"
    sizes = {"vocab_size": 768, "vocab_size_per_layer_input": 768, "max_position_embeddings": 1024}
    build("gemma4_text", **sizes).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(find_model("tiny").folder / name, folder)
    assert "per_layer_config" in json.loads((folder / "config.json").read_text())
    assert main(["check", f"model.path={folder}", "eval.samples=2", "rollout.tools=[calculate]"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "KV cache 0.6 kB a token" in said and "warning" not in said
