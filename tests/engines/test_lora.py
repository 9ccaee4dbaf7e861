"""LoRA adds nothing at the start, trains its factors and nothing else, merges to the same model, and peft reads it."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import accumulate, score
from safetensors.torch import load_file
from torch import Tensor

from turnwise.config import LearnerConfig
from turnwise.config.choices import Precision
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.learners.losses import PolicyTokens
from turnwise.engines.model import attention
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.huggingface_folder import DecoderConfig
from turnwise.engines.model.lora import TARGETS, LoraDecoder
from turnwise.engines.model.policy_model import ModelInputs
from turnwise.errors import EngineError

LENGTHS = [12, 30]
INDEX = torch.tensor([*range(4, 11), *range(15, 40)])
TOKENS = torch.randint(0, 96, (42,), generator=torch.Generator().manual_seed(2))
SOME = ("q_proj", "v_proj", "up_proj", "down_proj")


def make(base: Decoder, targets: tuple[str, ...] = TARGETS, **options: Any) -> LocalLearner:
    lora = LoraDecoder(base, rank=4, alpha=12.0, targets=targets, seed=1)
    return LocalLearner(lora, LearnerConfig(lr=1e-2, **options), temperature=1.0)


def train(learner: LocalLearner, steps: int) -> None:
    def loss(found: PolicyTokens) -> tuple[Tensor, dict[str, float]]:
        return -found.logprobs.mean(), {}

    for _ in range(steps):
        accumulate(learner, (TOKENS, LENGTHS, INDEX), loss)
        learner.optim_step()


def hidden(decoder: Decoder) -> Tensor:
    with torch.no_grad():
        states: Tensor = decoder(ModelInputs(TOKENS, attention.positions(LENGTHS)), attention.packed(LENGTHS))
        return states


@pytest.fixture
def base(decoder: Decoder) -> Decoder:
    return Decoder(decoder.config, {name: tensor.clone() for name, tensor in decoder.tensors().items()})


def test_adds_nothing_at_the_start(base: Decoder) -> None:
    lora = LoraDecoder(base, rank=16, alpha=32.0, seed=0)
    assert torch.equal(hidden(lora), hidden(base))
    assert all(torch.equal(tensor, base.tensors()[name]) for name, tensor in lora.tensors().items())
    assert lora.embed.data_ptr() == base.embed.data_ptr(), "the base is not copied"


@pytest.mark.parametrize("targets", [TARGETS, SOME, ("k_proj",)])
def test_only_factors_change_and_merging_changes_nothing(base: Decoder, decoder: Decoder, targets: Any) -> None:
    learner = make(base, targets)
    lora = learner.model
    assert isinstance(lora, LoraDecoder)
    trained = {name for name, parameter in lora.named_parameters() if parameter.requires_grad}
    assert trained == {f"layers.{i}.{t}_{kind}" for i in range(2) for t in targets for kind in "AB"}
    start = hidden(lora)
    train(learner, 3)
    assert all(float(lora.get_parameter(name).detach().abs().max()) > 0 for name in trained)
    assert all(torch.equal(tensor, decoder.tensors()[name]) for name, tensor in lora.base().items())
    merged = Decoder(lora.config, learner.model.tensors())
    assert (hidden(lora) - start).abs().max() > 0.05
    torch.testing.assert_close(hidden(merged), hidden(lora), atol=1e-5, rtol=1e-5)


def test_rows_of_other_projections_stay(base: Decoder) -> None:
    learner = make(base, ("q_proj", "v_proj"))
    train(learner, 2)
    same = (learner.model.tensors()["layers.0.qkv"] == base.tensors()["layers.0.qkv"]).all(1)
    assert same.tolist() == [False] * 64 + [True] * 32 + [False] * 32  # four heads of q, two of k, two of v


def test_factors_follow_the_seed(base: Decoder) -> None:
    one, same, other = (
        LoraDecoder(base, rank=16, alpha=32.0, seed=seed).get_parameter("layers.1.k_proj_A") for seed in (1, 1, 2)
    )
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rank": 0}, "rank"),
        ({"alpha": 0.0}, "alpha"),
        ({"targets": ()}, "targets"),
        ({"targets": ("q_prj",)}, "q_proj"),
    ],
)
def test_bad_settings_are_refused(base: Decoder, values: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        LoraDecoder(base, **{"rank": 4, "alpha": 12.0, "seed": 0, **values})


def test_a_narrow_base_takes_wide_factors() -> None:
    narrow = Decoder.fresh(DecoderConfig("qwen3", 96, 64, 128, 2, 4, 2, 16, 512), 1, torch.bfloat16)
    with pytest.raises(EngineError, match="precision"):
        make(narrow)
    learner = make(narrow, precision=Precision.bfloat16)
    before = score(learner, (TOKENS, LENGTHS, INDEX)).mean()
    train(learner, 6)
    assert score(learner, (TOKENS, LENGTHS, INDEX)).mean() > before + 0.05
    kinds = {parameter.dtype for parameter in learner.model.parameters() if parameter.requires_grad}
    assert kinds == {torch.float32}
    assert learner.model.tensors()["layers.0.qkv"].dtype == torch.bfloat16


@pytest.mark.parametrize("targets", [TARGETS, SOME])
def test_the_adapter_has_pefts_names_and_is_the_merged_policy(
    base: Decoder, targets: tuple[str, ...], tmp_path: Path
) -> None:
    base.save(tmp_path / "base")
    learner = make(base, targets)
    train(learner, 3)
    assert isinstance(learner.model, LoraDecoder)
    learner.model.save_adapter(tmp_path / "adapter", base_model=str(tmp_path / "base"))
    learner.model.save(tmp_path / "merged")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"], config["bias"]) == ("LORA", "CAUSAL_LM", "none")
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    assert set(config["target_modules"]) == set(targets) and (config["r"], config["lora_alpha"]) == (4, 12.0)
    start, merged, factors = (
        load_file(tmp_path / name)
        for name in ("base/model.safetensors", "merged/model.safetensors", "adapter/adapter_model.safetensors")
    )
    trained = [name.removesuffix(".weight") for name in start if name.split(".")[-2] in targets]
    prefix = "base_model.model."
    assert factors.keys() == {f"{prefix}{name}.lora_{kind}.weight" for name in trained for kind in "AB"}
    for name, tensor in start.items():
        if (module := name.removesuffix(".weight")) in trained:
            a, b = (factors[f"{prefix}{module}.lora_{kind}.weight"] for kind in "AB")
            assert (a.shape, b.shape) == ((4, tensor.shape[1]), (tensor.shape[0], 4))
            tensor = tensor + 12.0 / 4 * (b @ a)
        torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=1e-6)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed (pip install peft)")
@pytest.mark.parametrize("targets", [TARGETS, SOME])
def test_peft_reads_the_adapter(base: Decoder, targets: tuple[str, ...], tmp_path: Path) -> None:
    import peft
    import transformers

    base.save(tmp_path / "base")
    learner = make(base, targets)
    train(learner, 3)
    assert isinstance(learner.model, LoraDecoder)
    learner.model.save_adapter(tmp_path / "adapter", base_model=str(tmp_path / "base"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with_adapter = peft.PeftModel.from_pretrained(model, str(tmp_path / "adapter")).eval()
    part = TOKENS[12:]
    with torch.no_grad():
        theirs = torch.log_softmax(with_adapter(part[None]).logits[0], -1)[:-1].gather(1, part[1:, None]).squeeze(1)
    ours = score(learner, (part, [30], torch.arange(1, 30)))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    merged = with_adapter.merge_and_unload().state_dict()
    learner.model.save(tmp_path / "merged")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    assert again.keys() == merged.keys()
    for name, tensor in again.items():
        torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=1e-6)
    untouched = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).state_dict()
    moved = {name.split(".")[-2] for name, tensor in again.items() if not torch.equal(tensor, untouched[name])}
    assert moved == set(targets)
