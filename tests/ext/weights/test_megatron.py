"""Megatron grids: cut and joined again bit for bit, laid out as Megatron lays them out, and what is wrong is named."""

import argparse
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from architectures import build
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from turnwise.engines.model.attention import packed, positions
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.huggingface_folder import read_config
from turnwise.engines.model.policy_model import ModelInputs
from turnwise.errors import EngineError
from turnwise.ext.weights.converting import grid_logits, verify
from turnwise.ext.weights.expected_tensors import expected_of
from turnwise.ext.weights.lazy_tensor import Stored, read_safetensors, same_bits
from turnwise.ext.weights.megatron import read_parts
from turnwise.ext.weights.megatron_layout import megatron_model

Turnwise = Callable[..., tuple[int, str]]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_biased": {"attention_bias": True, "tie_word_embeddings": False},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen2_untied": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3_untied": {"num_attention_heads": 8, "num_key_value_heads": 4},
}
"""Tied and not, with biases and without, heads wider than the hidden size, eight queries of two groups."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, changes in FAMILIES.items():
        build(name.partition("_")[0], num_hidden_layers=8, vocab_size=97, **changes).save_pretrained(root / name)
    return root


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(same_bits(one[name], other[name]) for name in one)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 1, 1), (1, 4, 1), (2, 2, 1), (2, 2, 2)])
def test_there_and_back(
    family: str, grid: tuple[int, int, int], models: Path, turnwise: Turnwise, tmp_path: Path
) -> None:
    tp, pp, vpp = grid
    words = ("--tp", tp, "--pp", pp, "--vpp", vpp, "--vocab-multiple", 16, "--verify")
    code, said = turnwise("weights", "to-mcore", models / family, tmp_path / "grid", *words)
    assert code == 0, said
    assert "bit by bit" in said
    files = sorted(str(path.relative_to(tmp_path / "grid")) for path in (tmp_path / "grid").rglob("*.pt"))
    assert len(files) == tp * pp
    assert files[-1] == (f"release/mp_rank_{tp - 1:02d}" + (f"_{pp - 1:03d}" if pp > 1 else "") + "/model_optim_rng.pt")
    code, said = turnwise("weights", "from-mcore", tmp_path / "grid", tmp_path / "back", "--verify")
    assert code == 0, said
    assert same(weights(tmp_path / "back"), weights(models / family))
    was, config = (json.loads((at / "config.json").read_text()) for at in (models / family, tmp_path / "back"))
    assert was == config
    if grid == (2, 2, 2):
        _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
        assert not any(info.values())


def test_where_layers_heads_and_words_lie(models: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    """Written out head by head and row by row, as Megatron's documents have it."""
    source = weights(models / "qwen3_untied")
    words = ("--tp", 2, "--pp", 2, "--vpp", 2)
    assert turnwise("weights", "to-mcore", models / "qwen3_untied", tmp_path / "grid", *words)[0] == 0
    state = torch.load(tmp_path / "grid/release/mp_rank_01_001/model_optim_rng.pt", weights_only=True)
    assert sorted(state) == ["checkpoint_version", "iteration", "model0", "model1"]
    assert (tmp_path / "grid/latest_checkpointed_iteration.txt").read_text() == "release\n"
    # Four parts of two layers each, taken in turns: stage 1 has layers 2, 3 in turn 0 and 6, 7 in turn 1.
    part, layer = state["model1"], "model.layers.7."
    qkv = part["decoder.layers.1.self_attention.linear_qkv.weight"]
    rows = []
    for group in (2, 3):  # the second of two ranks has the last two of four groups, each of two query heads
        for head in (2 * group, 2 * group + 1):
            rows.append(source[layer + "self_attn.q_proj.weight"][head * 8 : head * 8 + 8])
        rows.append(source[layer + "self_attn.k_proj.weight"][group * 8 : group * 8 + 8])
        rows.append(source[layer + "self_attn.v_proj.weight"][group * 8 : group * 8 + 8])
    assert torch.equal(qkv, torch.cat(rows))
    gate, up = source[layer + "mlp.gate_proj.weight"], source[layer + "mlp.up_proj.weight"]
    assert torch.equal(part["decoder.layers.1.mlp.linear_fc1.weight"], torch.cat([gate[24:], up[24:]]))
    assert torch.equal(part["decoder.layers.1.mlp.linear_fc2.weight"], source[layer + "mlp.down_proj.weight"][:, 24:])
    proj = part["decoder.layers.1.self_attention.linear_proj.weight"]
    assert torch.equal(proj, source[layer + "self_attn.o_proj.weight"][:, 32:])
    norm = part["decoder.layers.1.mlp.linear_fc1.layer_norm_weight"]
    assert torch.equal(norm, source[layer + "post_attention_layernorm.weight"])
    assert torch.equal(
        part["decoder.layers.1.self_attention.k_layernorm.weight"], source[layer + "self_attn.k_norm.weight"]
    )
    # 97 words are padded to 128 for each of two ranks: all of them are the first one's.
    assert part["output_layer.weight"].shape == (128, 32) and not part["output_layer.weight"].any()
    first = torch.load(tmp_path / "grid/release/mp_rank_00_000/model_optim_rng.pt", weights_only=True)["model0"]
    assert torch.equal(first["embedding.word_embeddings.weight"][:97], source["model.embed_tokens.weight"])
    assert "decoder.final_layernorm.weight" in part and "output_layer.weight" not in first


def test_another_number_format(models: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    words = ("--tp", 2, "--dtype", "bfloat16", "--verify")
    code, said = turnwise("weights", "to-mcore", models / "llama_biased", tmp_path / "grid", *words)
    assert code == 0, said
    assert turnwise("weights", "from-mcore", tmp_path / "grid", tmp_path / "back")[0] == 0
    wanted = {name: tensor.bfloat16() for name, tensor in weights(models / "llama_biased").items()}
    assert same(weights(tmp_path / "back"), wanted)
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == "bfloat16"
    shutil.copytree(models / "llama_biased", tmp_path / "wide")
    large = weights(tmp_path / "wide") | {"model.norm.weight": torch.full((32,), 1e6)}
    save_file(large, tmp_path / "wide/model.safetensors", {"format": "pt"})
    code, said = turnwise("weights", "to-mcore", tmp_path / "wide", tmp_path / "narrow", "--dtype", "float16")
    assert code == 2 and "final_layernorm.weight holds NaN or infinite numbers as torch.float16" in said
    assert not (tmp_path / "narrow").exists()


def parts_by_hand(source: dict[str, Tensor], layers: list[range]) -> Iterator[dict[str, Tensor]]:
    """One rank's parts with these layers each, named as Megatron's layers without Transformer Engine are."""
    for number, numbers in enumerate(layers):
        part: dict[str, Tensor] = {}
        if number == 0:
            part["embedding.word_embeddings.weight"] = torch.cat(
                [source["model.embed_tokens.weight"], torch.randn(31, 32)]
            )
        for local, index in enumerate(numbers):
            theirs, ours = f"decoder.layers.{local}.", f"model.layers.{index}."
            for kind in ("weight", "bias"):
                q, k, v = (source[f"{ours}self_attn.{part}_proj.{kind}"].split(8) for part in "qkv")
                mixed = [head for group in range(2) for head in (*q[2 * group : 2 * group + 2], k[group], v[group])]
                part[f"{theirs}self_attention.linear_qkv.{kind}"] = torch.cat(mixed)
            part[f"{theirs}self_attention.linear_qkv._extra_state"] = torch.ones(3)
            part[f"{theirs}input_layernorm.weight"] = source[f"{ours}input_layernorm.weight"]
            part[f"{theirs}pre_mlp_layernorm.weight"] = source[f"{ours}post_attention_layernorm.weight"]
            part[f"{theirs}self_attention.linear_proj.weight"] = source[f"{ours}self_attn.o_proj.weight"]
            both = [source[f"{ours}mlp.{half}_proj.weight"] for half in ("gate", "up")]
            part[f"{theirs}mlp.linear_fc1.weight"] = torch.cat(both)
            part[f"{theirs}mlp.linear_fc2.weight"] = source[f"{ours}mlp.down_proj.weight"]
        if number == len(layers) - 1:
            part["decoder.final_layernorm.weight"] = source["model.norm.weight"]
            part["output_layer.weight"] = torch.cat([source["lm_head.weight"], torch.zeros(31, 32)])
        yield part


def test_a_grid_as_verl_saves_it_has_hugging_face_names(models: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    """Lists of turns in `model/mp_rank_00_PPP/model.pt`, uneven parts, one of them empty.

    The merger these come from leaves Megatron's names, and counts a part without layers as one layer.
    """
    source = weights(models / "qwen2_untied")
    actor = tmp_path / "global_step_3/actor"
    shutil.copytree(models / "qwen2_untied", actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    parts = list(parts_by_hand(source, [range(0), range(0, 3), range(3, 5), range(5, 8)]))
    for stage in range(2):
        place = actor / f"model/mp_rank_00_{stage:03d}"
        place.mkdir(parents=True)
        torch.save([parts[stage], parts[2 + stage]], place / "model.pt")
    code, said = turnwise("weights", "merge", tmp_path / "global_step_3", tmp_path / "out")
    assert code == 0, said
    assert same(weights(tmp_path / "out"), source)
    assert turnwise("weights", "from-mcore", actor, tmp_path / "proved", "--verify", "--dtype", "bfloat16")[0] == 0
    assert same(weights(tmp_path / "proved"), {name: tensor.bfloat16() for name, tensor in source.items()})


def test_what_megatron_keeps_beside_the_weights(models: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    part = next(parts_by_hand(weights(models / "qwen2_untied"), [range(8)]))
    part["decoder.layers.0.mlp.linear_fc1._extra_state"] = io.BytesIO(b"state")  # type: ignore[assignment]
    place = tmp_path / "run/iter_0000040/mp_rank_00"
    place.mkdir(parents=True)
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("40")
    rng = [{"np_rng_state": np.random.get_state(), "random_rng_state": (3, (1, 2), None)}]
    options = argparse.Namespace(tensor_model_parallel_size=1, save="x", dtype=torch.bfloat16)
    state = {"args": options, "checkpoint_version": 3.0, "iteration": 40, "model": part, "rng_state": rng}
    torch.save(state, place / "model_optim_rng.pt")
    code, said = turnwise("weights", "merge", tmp_path / "run", tmp_path / "out", "--hf", models / "qwen2_untied")
    assert code == 0, said
    assert same(weights(tmp_path / "out"), weights(models / "qwen2_untied"))


@pytest.mark.parametrize("apart", [False, True])
def test_megatrons_distributed_format(apart: bool, models: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    """All layers of a tensor in one, gate and up in one or apart, and an optimiser with the same names."""
    part = next(parts_by_hand(weights(models / "qwen2_untied"), [range(8)]))
    stacked: dict[str, Any] = {name: tensor for name, tensor in part.items() if ".layers." not in name}
    for name in {name.partition("layers.0.")[2] for name in part if ".layers.0." in name and "_extra" not in name}:
        stacked[f"decoder.layers.{name}"] = torch.stack([part[f"decoder.layers.{index}.{name}"] for index in range(8)])
    if apart:
        fused = stacked.pop("decoder.layers.mlp.linear_fc1.weight")
        stacked["decoder.layers.mlp.linear_fc1.weight_w"], stacked["decoder.layers.mlp.linear_fc1.weight_v"] = (
            half.contiguous() for half in fused.chunk(2, 1)
        )
    stacked |= {f"optimizer.state.exp_avg.{name}": torch.zeros(1) for name in stacked}
    folder = tmp_path / "actor/model"
    shutil.copytree(models / "qwen2_untied", folder / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    dcp.save(stacked, checkpoint_id=folder / "dist_ckpt", no_dist=True)
    code, said = turnwise("weights", "from-mcore", tmp_path / "actor", tmp_path / "out", "--verify")
    assert code == 0, said
    assert same(weights(tmp_path / "out"), weights(models / "qwen2_untied"))


# --- what is wrong is named ---------------------------------------------------------------------------------------------


def refused(turnwise: Turnwise, folder: Path, *words: object) -> str:
    code, said = turnwise("weights", "from-mcore", folder, folder.parent / "out", *words)
    assert code == 2 and said.count("\n") == 1, said
    assert not [path for path in folder.parent.iterdir() if "out" in path.name]
    return said


def changed(path: Path, change: Callable[[dict[str, Any]], object], key: str = "model") -> None:
    state = torch.load(path, weights_only=True)
    change(state[key])
    torch.save(state, path)


@pytest.fixture
def grid(models: Path, turnwise: Turnwise, tmp_path: Path) -> Path:
    assert turnwise("weights", "to-mcore", models / "qwen2", tmp_path / "grid", "--tp", 2, "--pp", 2)[0] == 0
    return tmp_path / "grid"


def test_missing_ranks_and_tensors_are_named(grid: Path, turnwise: Turnwise) -> None:
    rank = grid / "release/mp_rank_01_001"
    file = rank / "model_optim_rng.pt"
    file.rename(grid / "kept.pt")
    assert "mp_rank_01_001 lacks model.pt or model_optim_rng.pt" in refused(turnwise, grid)
    rank.rmdir()
    assert "lacks mp_rank_01_001 of its grid of 2 x 2" in refused(turnwise, grid)
    rank.mkdir()
    shutil.copy(grid / "kept.pt", file)
    changed(file, lambda part: part.pop("decoder.layers.1.mlp.linear_fc2.weight"))
    assert "differ in decoder.layers.1.mlp.linear_fc2.weight" in refused(turnwise, grid)
    changed(
        grid / "release/mp_rank_00_001/model_optim_rng.pt",
        lambda part: part.pop("decoder.layers.1.mlp.linear_fc2.weight"),
    )
    assert "lacks decoder.layers.1.mlp.linear_fc2.weight" in refused(turnwise, grid)
    (grid / "release/mp_rank_00_000_003").mkdir()
    assert "expert parallelism is not read" in refused(turnwise, grid)


def test_ranks_that_disagree_and_parts_that_do_not_fit(grid: Path, turnwise: Turnwise) -> None:
    files = [grid / f"release/mp_rank_{rank:02d}_{stage:03d}/model_optim_rng.pt" for stage in (0, 1) for rank in (0, 1)]
    good = [file.read_bytes() for file in files]

    def after(*changes: tuple[int, Callable[[dict[str, Any]], object]]) -> str:
        for file, content in zip(files, good, strict=True):
            file.write_bytes(content)
        for number, change in changes:
            changed(files[number], change)
        return refused(turnwise, grid)

    norm, words = "decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "embedding.word_embeddings.weight"
    assert "must be the same" in after((1, lambda part: part[norm].add_(1)))
    assert "not of one shape" in after((1, lambda part: part.update({words: part[words][:2]})))
    more = {"decoder.layers.9.x": torch.ones(1)}
    assert "not numbered from 0" in after((0, lambda part: part.update(more)), (1, lambda part: part.update(more)))
    odd = {"mlp.router.weight": torch.ones(1)}
    assert "holds mlp.router.weight" in after((0, lambda part: part.update(odd)), (1, lambda part: part.update(odd)))
    tied = "output_layer.weight"
    assert "config.json ties them" in after((2, lambda part: part[tied].add_(1)))
    small = "decoder.layers.0.self_attention.linear_qkv.weight"
    cut = [(number, lambda part: part.update({small: part[small][:8]})) for number in (0, 1)]
    assert "groups of 32 rows" in after(*cut)
    drop = [(number, lambda part: [part.pop(name) for name in list(part) if ".3." in name]) for number in (2, 3)]
    assert "holds 7 layers, config.json says 8" in after(*drop)


def test_grids_that_a_model_cannot_be_cut_into(models: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    for words, said in (
        (("--tp", 3), "2 key/value heads cannot be shared evenly"),
        (("--pp", 3), "8 layers cannot be shared evenly"),
        (("--pp", 1, "--vpp", 2), "turns need several stages"),
        (("--tp", 0), "at least 1"),
        (("--all",), "--all is for merge, not for to-mcore"),
    ):
        code, text = turnwise("weights", "to-mcore", models / "qwen2", tmp_path / "grid", *words)
        assert code == 2 and said in text and not (tmp_path / "grid").exists()
    code, text = turnwise(
        "weights", "to-mcore", models / "qwen2", tmp_path / "grid", "--format", "distributed", "--tp", 2
    )
    assert code == 2 and "knows of no split" in text
    build("olmo2").save_pretrained(tmp_path / "other")
    code, text = turnwise("weights", "to-mcore", tmp_path / "other", tmp_path / "grid")
    assert code == 2 and "this model is olmo2" in text
    build("llama", mlp_bias=True).save_pretrained(tmp_path / "biased")
    code, text = turnwise("weights", "to-mcore", tmp_path / "biased", tmp_path / "grid")
    assert code == 2 and "model.layers.0.mlp.down_proj.bias" in text and "have no place" in text
    code, text = turnwise("weights", "from-mcore", models / "qwen2", tmp_path / "grid")
    assert code == 2 and "a Hugging Face folder, not Megatron's" in text


def test_the_proof_finds_heads_in_another_order(models: Path, grid: Path) -> None:
    """Cutting and joining could both mistake the order of heads; the pass over the grid would not."""
    config, tokens = read_config(models / "qwen2"), torch.arange(20)
    shape, parts = read_parts(grid / "release")
    model = Decoder.read(models / "qwen2")
    with torch.no_grad():
        wanted = model.logits(model(ModelInputs(tokens, positions([20])), packed([20])))
        assert torch.allclose(grid_logits(shape, parts, config, tokens), wanted, atol=1e-4)
        name = "decoder.layers.0.self_attention.linear_qkv.weight"
        heads = parts[0, 0, 1][name].read().split(8)
        parts[0, 0, 1][name] = Stored.of(torch.cat((*heads[:2], heads[3], heads[2])))
        assert (grid_logits(shape, parts, config, tokens) - wanted).abs().max() > 0.01
    with pytest.raises(EngineError, match="linear_qkv.weight of stage 0, turn 0, rank 1 changed in the conversion"):
        verify(
            shape,
            parts,
            read_safetensors(models / "qwen2"),
            megatron_model(expected_of(models / "qwen2"), "here"),
            None,
        )
