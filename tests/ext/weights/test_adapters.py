"""LoRA factors that verl's shards hold: folded into the model, or kept apart as peft reads them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from turnwise.ext.weights.lazy_tensor import same_bits

Turnwise = Callable[..., tuple[int, str]]
TOKENS = torch.arange(1, 9)[None]


def logits(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        return (model if adapter is None else PeftModel.from_pretrained(model, adapter))(TOKENS).logits


@pytest.mark.parametrize(("case", "alone"), [("three/lora", False), ("two/lora_alone", True)])
def test_a_model_with_its_adapter_folded_in(
    case: str, alone: bool, shards: Path, turnwise: Turnwise, tmp_path: Path
) -> None:
    base = ("--base", shards / case / "original") if alone else ()
    code, said = turnwise("weights", "merge", shards / case, tmp_path / "out", *base)
    assert code == 0, said
    wanted = torch.load(shards / case / "logits.pt")
    assert torch.allclose(logits(tmp_path / "out"), wanted, atol=1e-4)
    assert not torch.allclose(logits(shards / case / "original"), wanted, atol=0.1), "the adapter does something"
    original, merged = (
        load_file(shards / case / "original/model.safetensors"),
        load_file(tmp_path / "out/model.safetensors"),
    )
    assert original.keys() == merged.keys()
    factors = load_file(shards / case / "peft/adapter_model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    a, b = (factors[f"base_model.model.{name}.lora_{kind}.weight"] for kind in "AB")
    assert torch.allclose(merged[f"{name}.weight"], original[f"{name}.weight"] + 1.5 * (b @ a), atol=1e-6)
    assert same_bits(merged["model.norm.weight"], original["model.norm.weight"])


@pytest.mark.parametrize(("case", "alone"), [("three/lora", False), ("two/lora_alone", True)])
def test_an_adapter_kept_apart_is_the_one_peft_saved(
    case: str, alone: bool, shards: Path, turnwise: Turnwise, tmp_path: Path
) -> None:
    """verl 0.6 writes an alpha of 0 into its config, with which peft adds nothing."""
    code, said = turnwise("weights", "merge", shards / case, tmp_path / "out", "--keep-adapter")
    assert code == 0, said
    place = tmp_path / "out" if alone else tmp_path / "out/lora_adapter"
    ours, theirs = (load_file(where / "adapter_model.safetensors") for where in (place, shards / case / "peft"))
    assert ours.keys() == theirs.keys() and all(same_bits(ours[name], theirs[name]) for name in ours)
    config = json.loads((place / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 6)
    model = shards / case / "original" if alone else tmp_path / "out"
    assert torch.allclose(logits(model, place), torch.load(shards / case / "logits.pt"), atol=1e-4)
    if not alone:
        original, written = (
            load_file(at / "model.safetensors") for at in (shards / case / "original", tmp_path / "out")
        )
        assert original.keys() == written.keys() and all(same_bits(original[name], written[name]) for name in original)


def test_an_alpha_that_nobody_wrote_down_is_asked_for(shards: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    """verl 0.6 has no lora_train_meta.json."""
    source = shutil.copytree(shards / "three/lora", tmp_path / "lora")
    turnwise("weights", "merge", source, tmp_path / "known")
    (source / "lora_train_meta.json").unlink()
    code, said = turnwise("weights", "merge", source, tmp_path / "out")
    assert code == 2 and "give training's value with --lora-alpha" in said and not (tmp_path / "out").exists()
    assert turnwise("weights", "merge", source, tmp_path / "out", "--lora-alpha", "6")[0] == 0
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "known/model.safetensors").read_bytes()
    (source / "lora_train_meta.json").write_text('{"r": 8, "lora_alpha": 6}')
    code, said = turnwise("weights", "merge", source, tmp_path / "other")
    assert code == 2 and "have the ranks [4]" in said and "says 8" in said
    for text in ("[]", '{"lora_alpha": "6"}', '{"lora_alpha": 0}', "{"):
        (source / "lora_train_meta.json").write_text(text)
        assert turnwise("weights", "merge", source, tmp_path / "other")[0] == 2


def test_options_about_adapters_where_there_is_none(shards: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    source = shards / "two/qwen2"
    for words, said in (
        (("--keep-adapter",), "holds no LoRA factors"),
        (("--lora-alpha", "6"), "holds no LoRA factors"),
        (("--lora-alpha", "-6"), "a positive number"),
        (("--base", source / "original"), "holds the model itself"),
    ):
        code, text = turnwise("weights", "merge", source, tmp_path / "out", *words)
        assert code == 2 and said in text
    code, text = turnwise("weights", "merge", shards / "two/lora_alone", tmp_path / "out")
    assert code == 2 and "--base, or --keep-adapter" in text
    code, text = turnwise(
        "weights", "merge", shards / "two/lora_alone", tmp_path / "out", "--base", source / "original"
    )
    assert code == 2 and not (tmp_path / "out").exists(), "factors of another model"
