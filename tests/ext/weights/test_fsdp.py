"""verl's FSDP shards, written by real processes of torch's FSDP, come out bit for bit as the weights that went in."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from turnwise.engines.model.decoder import Decoder
from turnwise.errors import StorageError
from turnwise.ext.weights.fsdp import read_fsdp
from turnwise.ext.weights.lazy_tensor import same_bits

Turnwise = Callable[..., tuple[int, str]]


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(same_bits(one[name], other[name]) for name in one)


def copy(source: Path, place: Path) -> Path:
    return shutil.copytree(source, place / source.name, ignore=shutil.ignore_patterns("original"))


@pytest.mark.parametrize(
    "case",
    [
        "four/hybrid",
        "four/tensor",
        "three/qwen3",
        "three/llama",
        "two/qwen2",
        "two/placed",
        "two/listed",
        "three/dcp",
        "two/critic",
        "two/experts",
    ],
)
def test_merged_is_what_was_sharded(case: str, shards: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    code, said = turnwise("weights", "merge", shards / case, tmp_path / "out")
    assert code == 0, said
    assert same(weights(tmp_path / "out"), weights(shards / case / "original"))
    kind = AutoModelForTokenClassification if case.endswith("critic") else AutoModelForCausalLM
    _, info = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), "transformers finds every tensor in its place"
    if case.rpartition("/")[2] in ("qwen3", "llama", "qwen2", "dcp"):
        ours, theirs = Decoder.read(tmp_path / "out"), Decoder.read(shards / case / "original")
        assert same(ours.tensors(), theirs.tensors())


def test_config_tokenizer_and_templates_come_along(shards: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    source = copy(shards / "two/qwen2", tmp_path)
    beside = source / "huggingface"
    files = {
        "tokenizer.json": "{}", "tokenizer_config.json": "{}", "vocab.txt": "a", "chat_template.jinja": "{{ messages }}",
        "additional_chat_templates/tool.jinja": "{{ tools }}", "generation_config.json": '{"eos_token_id": 2}',
    }  # fmt: skip
    for name, text in files.items():
        (beside / name).parent.mkdir(exist_ok=True)
        (beside / name).write_text(text)
    (beside / "model.safetensors").write_bytes(b"stale")
    (beside / "model.safetensors.index.json").write_text("stale")
    code, said = turnwise("weights", "merge", source, tmp_path / "out", "--dtype", "bfloat16", "--json")
    assert code == 0, said
    assert json.loads(said.splitlines()[-1]) == {
        "target": str(tmp_path / "out"), "tensors": 26, "kind": "fsdp",
        "bytes": sum(tensor.nbytes for tensor in weights(tmp_path / "out").values()),
    }  # fmt: skip
    assert {name: (tmp_path / "out" / name).read_text() for name in files} == files
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    original = weights(shards / "two/qwen2/original")
    assert same(weights(tmp_path / "out"), {name: tensor.bfloat16() for name, tensor in original.items()})
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((beside / "config.json").read_text())["dtype"] == "float32"


def test_many_files_with_an_index_in_bytes(shards: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    code, said = turnwise("weights", "merge", shards / "two/qwen2", tmp_path / "out", "--max-file-size", "20KB")
    assert code == 0, said
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files == sorted(set(index["weight_map"].values()))
    found = weights(tmp_path / "out")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert same(found, weights(shards / "two/qwen2/original"))
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert Decoder.read(tmp_path / "out").config.num_layers == 2


# --- what is wrong with a checkpoint is named, and nothing is written -------------------------------------------------


def refused(turnwise: Turnwise, source: Path, *words: object) -> str:
    target = source.parent / "out"
    code, said = turnwise("weights", "merge", source, target, *words)
    assert code == 2 and said.count("\n") == 1, said
    assert [path for path in source.parent.iterdir() if "out" in path.name] == []
    return said


def test_missing_surplus_and_broken_shards_are_named(shards: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    source = copy(shards / "three/llama", tmp_path)
    (source / "model_world_size_3_rank_1.pt").rename(tmp_path / "kept")
    assert "lacks model_world_size_3_rank_1.pt: 3 ranks saved it" in refused(turnwise, source)
    whole = (tmp_path / "kept").read_bytes()
    (source / "model_world_size_3_rank_1.pt").write_bytes(whole[: len(whole) // 2])
    assert f"{source / 'model_world_size_3_rank_1.pt'} cannot be read" in refused(turnwise, source)
    (source / "model_world_size_3_rank_1.pt").write_bytes(b"")
    assert "model_world_size_3_rank_1.pt cannot be read" in refused(turnwise, source)
    (source / "model_world_size_3_rank_1.pt").write_bytes(whole)
    (source / "model_world_size_8_rank_7.pt").write_bytes(whole)
    assert "holds model_world_size_8_rank_7.pt beside the shards of its 3 ranks" in refused(turnwise, source)
    (source / "fsdp_config.json").unlink()
    assert "shards of 3 and of 8 ranks" in refused(turnwise, source)
    (source / "model_world_size_8_rank_7.pt").unlink()
    assert turnwise("weights", "merge", source, tmp_path / "merged")[0] == 0, "early versions of verl wrote no config"


def test_another_model_than_the_config_says_is_refused(shards: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    source = copy(shards / "two/qwen2", tmp_path)
    config = source / "huggingface/config.json"
    was = json.loads(config.read_text())

    def with_config(**changes: Any) -> str:
        config.write_text(json.dumps(was | changes))
        return refused(turnwise, source)

    assert "lacks model.layers.2.input_layernorm.weight" in with_config(num_hidden_layers=3, layer_types=None)
    assert "holds model.layers.1.input_layernorm.weight" in with_config(num_hidden_layers=1, layer_types=None)
    assert "model.embed_tokens.weight is (96, 32)" in with_config(vocab_size=97)
    assert "has no class 'Nobody'" in with_config(architectures=["Nobody"])
    assert "num_attention_heads must be a positive integer" in with_config(num_attention_heads=-1)
    config.unlink()
    assert "give --hf" in refused(turnwise, source)
    assert turnwise("weights", "merge", source, tmp_path / "o", "--hf", shards / "two/qwen2/original")[0] == 0
    assert "no config.json" in refused(turnwise, source, "--hf", tmp_path)


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A shard of plain tensors, changed."""
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


@pytest.fixture
def plain(shards: Path, tmp_path: Path) -> Path:
    """Two ranks with plain tensors: matrices as rows of the whole, all else whole on each."""
    folder = tmp_path / "plain"
    shutil.copytree(shards / "two/qwen2/huggingface", folder / "huggingface")
    original = weights(shards / "two/qwen2/original") | {"model.rotary_emb.inv_freq": torch.ones(4)}
    for rank in range(2):
        rows = {name: tensor.chunk(2)[rank].clone() for name, tensor in original.items() if tensor.dim() == 2}
        torch.save(original | rows, folder / f"model_world_size_2_rank_{rank}.pt")
    return folder


def test_tensors_without_a_placement_are_whole_or_rows(
    plain: Path, shards: Path, turnwise: Turnwise, tmp_path: Path
) -> None:
    """verl 0.6 puts all of them one below the other, also those that every rank has whole; 0.9 takes all for whole."""
    code, said = turnwise("weights", "merge", plain, tmp_path / "merged")
    assert code == 0, said
    assert same(weights(tmp_path / "merged"), weights(shards / "two/qwen2/original"))
    rewritten(plain / "model_world_size_2_rank_1.pt", lambda state: state["model.norm.weight"].add_(1))
    said = refused(turnwise, plain)
    assert "model.norm.weight differs between model_world_size_2_rank_0.pt and model_world_size_2_rank_1.pt" in said


def test_numbers_that_no_model_computes_with(plain: Path, turnwise: Turnwise) -> None:
    shard = plain / "model_world_size_2_rank_0.pt"
    rewritten(shard, lambda state: state["model.layers.1.mlp.up_proj.weight"].view(-1)[3].fill_(1e6))
    said = refused(turnwise, plain, "--dtype", "float16")
    assert "model.layers.1.mlp.up_proj.weight holds NaN or infinite numbers as torch.float16" in said
    rewritten(shard, lambda state: state["model.layers.1.mlp.up_proj.weight"].view(-1)[3].fill_(float("nan")))
    assert "up_proj.weight holds NaN or infinite numbers\n" in refused(turnwise, plain)


def test_shards_that_disagree_are_refused(plain: Path, turnwise: Turnwise) -> None:
    shard = plain / "model_world_size_2_rank_1.pt"
    rewritten(shard, lambda state: state.update(more=torch.ones(1)))
    assert "more is in one of them only" in refused(turnwise, plain)
    rewritten(shard, lambda state: state.pop("more"))
    rewritten(shard, lambda state: state.update({"lm_head.weight": torch.ones(48, 32)}))
    rewritten(
        plain / "model_world_size_2_rank_0.pt", lambda state: state.update({"lm_head.weight": torch.ones(48, 32)})
    )
    assert "lm_head.weight differs from model.embed_tokens.weight, and config.json ties them" in refused(
        turnwise, plain
    )
    rewritten(shard, lambda state: state.update({"model.norm.weight": torch.ones(32, dtype=torch.bfloat16)}))
    assert "model.norm.weight is torch.bfloat16 there" in refused(turnwise, plain)


# --- other shapes of meshes, other versions of torch -------------------------------------------------------------------


def renamed(path: Path, names: dict[bytes, bytes]) -> None:
    """The same pickle with other names of classes."""
    with zipfile.ZipFile(path) as archive:
        entries = {entry: archive.read(entry) for entry in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for entry, content in entries.items():
            if entry.endswith("data.pkl"):
                for old, new in names.items():
                    assert old in content
                    content = content.replace(old, new)
            archive.writestr(entry, content)


def test_pickles_of_older_torch_name_the_classes_elsewhere(shards: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    source = copy(shards / "two/qwen2", tmp_path)
    for path in source.glob("*.pt"):
        renamed(
            path,
            {
                b"torch.distributed.tensor\nDTensor\n": b"torch.distributed._tensor.api\nDTensor\n",
                b"tensor._dtensor_spec\nDTensorSpec\n": b"_tensor.placement_types\nDTensorSpec\n",
                b"tensor._dtensor_spec\nTensorMeta\n": b"_tensor.placement_types\nTensorMeta\n",
                b"tensor.placement_types\nShard\n": b"_tensor.placement_types\nShard\n",
            },
        )
    code, said = turnwise("weights", "merge", source, tmp_path / "out")
    assert code == 0, said
    assert same(weights(tmp_path / "out"), weights(shards / "two/qwen2/original"))


def test_placements_that_are_not_put_together_are_named(shards: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    source = copy(shards / "two/qwen2", tmp_path)
    for path in source.glob("*.pt"):
        renamed(path, {b"placement_types\nShard\n": b"placement_types\nPartial\n"})
    said = refused(turnwise, source)
    assert "model.embed_tokens.weight is Partial over the ranks, which is not put together" in said
    for path in source.glob("*.pt"):
        renamed(
            path,
            {b"placement_types\nPartial\n": b"placement_types\nShard\n", b"_coordinate_on_dim": b"_coordinate_on_nil"},
        )
    assert "model.embed_tokens.weight does not say how it is sharded" in refused(turnwise, source)


def test_the_classes_of_torch_that_this_process_knows_are_not_used(shards: Path) -> None:
    from torch.distributed.tensor import DTensor

    before = torch.serialization.get_safe_globals()
    assert DTensor in before
    found = read_fsdp(shards / "two/qwen2", {})
    assert same_bits(found["model.norm.weight"].read(), weights(shards / "two/qwen2/original")["model.norm.weight"])
    assert set(torch.serialization.get_safe_globals()) == set(before)


def test_a_copy_that_went_another_way_is_named(shards: Path, tmp_path: Path) -> None:
    """Two groups of ranks hold the same shards; a bit that differs is found when the tensor is read."""
    source = copy(shards / "four/hybrid", tmp_path)
    path = source / "model_world_size_4_rank_3.pt"
    renamed(path, {b"_coordinate_on_dim": b"_coordinate_on_dim"})
    wrong = read_fsdp(source, {})
    assert same_bits(wrong["model.norm.weight"].read(), weights(shards / "four/hybrid/original")["model.norm.weight"])
    content = bytearray(path.read_bytes())
    place = content.rindex(wrong["model.norm.weight"].read()[16:].numpy().tobytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"model.norm.weight differs between model_world_size_4_rank_1.pt and"):
        read_fsdp(source, {})["model.norm.weight"].read()
