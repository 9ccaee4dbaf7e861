"""Families with images and experts in both of Megatron's formats: there and back bit for bit, and where each lies."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from architectures import build
from safetensors.torch import load_file
from torch import Tensor
from vision_families import SEEING
from vision_families import build as build_seeing

from turnwise.ext.weights.distributed import read_distributed
from turnwise.ext.weights.lazy_tensor import same_bits

Turnwise = Callable[..., tuple[int, str]]
SEEN = {
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_5_vl, 3 x 3 patches a token",
    "qwen3_vl": "qwen3_vl, tied, features into three layers",
    "qwen3_vl_moe": "qwen3_vl_moe",
}
EXPERTS: dict[str, dict[str, Any]] = {"qwen3_moe": {"mlp_only_layers": []}, "qwen3_moe, one layer dense": {}}
EVERY = (*SEEN, *EXPERTS, "qwen2_5_vl, tied")


def made(name: str, folder: Path) -> dict[str, Tensor]:
    """A tiny model of this name in a folder, and its tensors."""
    if name in EXPERTS:
        build("qwen3_moe", **EXPERTS[name]).save_pretrained(folder)
    else:
        kind, _, tied = name.partition(", ")
        family = SEEING[SEEN[kind]]
        changed = dataclasses.replace(family, config=family.config | {"tie_word_embeddings": bool(tied)})
        build_seeing(changed).bfloat16().save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def there_and_back(turnwise: Turnwise, folder: Path, *words: object) -> dict[str, Tensor]:
    code, said = turnwise("weights", "to-mcore", folder / "hf", folder / "mcore", "--verify", *words)
    assert code == 0 and "bit by bit" in said, said
    code, said = turnwise("weights", "from-mcore", folder / "mcore", folder / "back", "--verify")
    assert code == 0, said
    return load_file(folder / "back/model.safetensors")


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(same_bits(one[name], other[name]) for name in one)


GRIDS = [(1, 1), (2, 1), (1, 2), (2, 2)]


@pytest.mark.long
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("grid", GRIDS)
def test_grids_of_every_family(name: str, grid: tuple[int, int], turnwise: Turnwise, tmp_path: Path) -> None:
    source = made(name, tmp_path / "hf")
    assert same(there_and_back(turnwise, tmp_path, "--tp", grid[0], "--pp", grid[1]), source)


@pytest.mark.long
@pytest.mark.parametrize("name", EVERY)
def test_the_distributed_format_of_every_family(name: str, turnwise: Turnwise, tmp_path: Path) -> None:
    source = made(name, tmp_path / "hf")
    assert same(there_and_back(turnwise, tmp_path, "--format", "distributed"), source)


def test_a_grid_of_a_model_that_sees(turnwise: Turnwise, tmp_path: Path) -> None:
    """The tower lies on the first stage, its heads one by one; the tied head is repeated on the last."""
    source = made("qwen2_5_vl, tied", tmp_path / "hf")
    assert same(there_and_back(turnwise, tmp_path, "--tp", 2, "--pp", 2), source)
    first, last = (
        torch.load(tmp_path / f"mcore/release/mp_rank_01_00{stage}/model_optim_rng.pt", weights_only=True)["model"]
        for stage in range(2)
    )
    whole = source["visual.blocks.1.attn.qkv.weight"].view(3, 2, 8, 16)  # q, k and v, of two heads
    assert same_bits(
        first["vision_model.decoder.layers.1.self_attention.linear_qkv.weight"], whole[:, 1].reshape(24, 16)
    )
    gate, up = (source[f"visual.blocks.0.mlp.{half}_proj.bias"][8:] for half in ("gate", "up"))
    assert same_bits(first["vision_model.decoder.layers.0.mlp.linear_fc1.bias"], torch.cat([gate, up]))
    assert not any(name.startswith("vision_model") for name in last)
    assert (
        "language_model.decoder.layers.0.mlp.linear_fc2.weight" in last and "language_model.output_layer.weight" in last
    )


def test_the_distributed_format_of_experts(turnwise: Turnwise, tmp_path: Path) -> None:
    """Layers in front, then experts, then gate above up; torch's own reader sees what ours does."""
    source = made("qwen3_moe", tmp_path / "hf")
    assert same(there_and_back(turnwise, tmp_path, "--format", "distributed", "--vocab-multiple", 64), source)
    folder = tmp_path / "mcore/release"
    stacked = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    held = read_distributed(folder)
    assert held[stacked].shape == (2, 4, 32, 32) and held["embedding.word_embeddings.weight"].shape == (128, 32)
    theirs = {stacked: torch.zeros(2, 4, 32, 32), "decoder.layers.pre_mlp_layernorm.weight": torch.zeros(2, 32)}
    dcp.load(theirs, checkpoint_id=folder, no_dist=True)
    halves = [source[f"model.layers.1.mlp.experts.3.{half}_proj.weight"] for half in ("gate", "up")]
    assert same_bits(theirs[stacked][1, 3], torch.cat(halves))
    norm = source["model.layers.0.post_attention_layernorm.weight"]
    assert same_bits(theirs["decoder.layers.pre_mlp_layernorm.weight"][0], norm)
    about = json.loads((folder / "metadata.json").read_text())
    assert about["sharded_backend"] == "torch_dist" and (folder / "common.pt").is_file()


def test_layers_that_differ_have_names_of_their_own(turnwise: Turnwise, tmp_path: Path) -> None:
    source = made("qwen3_moe, one layer dense", tmp_path / "hf")
    assert same(there_and_back(turnwise, tmp_path, "--format", "distributed"), source)
    held = read_distributed(tmp_path / "mcore/release")
    assert held["decoder.layers.0.mlp.linear_fc2.weight"].shape == (32, 48)
    assert held["decoder.layers.1.mlp.experts.experts.linear_fc2.weight"].shape == (4, 32, 16)


def test_what_does_not_fit_is_named(turnwise: Turnwise, tmp_path: Path) -> None:
    made("qwen3_moe", tmp_path / "hf")
    assert turnwise("weights", "to-mcore", tmp_path / "hf", tmp_path / "mcore", "--format", "distributed")[0] == 0
    path = tmp_path / "mcore/huggingface/config.json"
    config = json.loads(path.read_text())
    for changed, said in (
        ({"num_local_experts": 5}, "config.json says (2, 5) in front"),
        ({"num_hidden_layers": 3}, "config.json says 3 layers"),
        ({"mlp_only_layers": [0, 1]}, "which this model has no place for"),
    ):
        path.write_text(json.dumps(config | changed))
        code, text = turnwise("weights", "from-mcore", tmp_path / "mcore", tmp_path / "out")
        assert code == 2 and said in text and text.count("\n") == 1, text
        assert not (tmp_path / "out").exists()
