"""The decoder computes what transformers computes, for every family and option it claims to support."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from turnwise.engines.model import attention
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.huggingface_folder import DecoderConfig
from turnwise.engines.model.policy_model import ModelInputs

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha-tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True}),
    "llama-mqa-head": ("Llama", {"num_key_value_heads": 1, "head_dim": 20}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-bias-tied": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True, "attention_bias": True}),
}


def make_reference(folder: Path, family: str, options: dict[str, Any], **save: Any) -> Any:
    """A random model of transformers, saved to the folder; norms and biases are random too."""
    torch.manual_seed(7)
    config = getattr(transformers, family + "Config")(**{**SMALL, **options})
    model = getattr(transformers, family + "ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.normal_(0.8, 0.3)
            else:
                parameter.mul_(6.0)
    model.save_pretrained(folder, **save)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model = make_reference(tmp_path / "theirs", *CASES[case])
    ids = torch.randint(0, SMALL["vocab_size"], (70,))
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
        decoder = Decoder.read(tmp_path / "theirs", torch.float32)
        actual = decoder.logits(decoder(ModelInputs(ids, torch.arange(70)), attention.packed([70])))
        assert expected.std() > 0.1, "a reference without contrast proves nothing"
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
        decoder.save(tmp_path / "ours")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
        torch.testing.assert_close(again(ids[None]).logits[0], expected, atol=0.0, rtol=0.0)
    assert Decoder.read(tmp_path / "ours").config == decoder.config


def test_sharded_folder_loads_the_same(tmp_path: Path) -> None:
    make_reference(tmp_path / "one", "Qwen3", {"head_dim": 16})
    make_reference(tmp_path / "many", "Qwen3", {"head_dim": 16}, max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = Decoder.read(tmp_path / "one"), Decoder.read(tmp_path / "many")
    for (name, a), (_, b) in zip(one.named_parameters(), many.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def tiny(model_type: str = "qwen3", **options: Any) -> DecoderConfig:
    values: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "context_length": 256,
    }
    return DecoderConfig(model_type, **{**values, **options})


def test_fresh_weights_follow_the_seed() -> None:
    first, same, other = (Decoder.fresh(tiny(), seed) for seed in (1, 1, 2))
    assert torch.equal(first.embed, same.embed) and not torch.equal(first.embed, other.embed)
    assert abs(float(first.embed.detach().std()) - 0.02) < 0.002


@pytest.mark.parametrize("lengths", [[40], [17, 17], [3, 60, 1, 31, 33, 59], list(range(1, 24))])
def test_packed_equals_one_by_one(lengths: list[int]) -> None:
    decoder = Decoder.fresh(tiny(tied=True), 3)
    with torch.no_grad():
        decoder.embed.mul_(20)
        ids = torch.randint(0, 64, (sum(lengths),), generator=torch.Generator().manual_seed(0))
        together = decoder(ModelInputs(ids, attention.positions(lengths)), attention.packed(lengths))
        alone = [
            decoder(ModelInputs(part, torch.arange(len(part))), attention.packed([len(part)]))
            for part in ids.split(lengths)
        ]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_gradient_reaches_every_weight_and_is_right() -> None:
    decoder = Decoder.fresh(tiny("llama", qkv_bias=True, output_bias=True), 5, torch.float64)
    lengths = [5, 9, 2]
    ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(1))

    def loss() -> torch.Tensor:
        hidden = decoder(ModelInputs(ids, attention.positions(lengths)), attention.packed(lengths))
        return torch.nn.functional.cross_entropy(decoder.logits(hidden), ids.roll(-1))

    loss().backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    weight = decoder.get_parameter("layers.0.qkv")
    assert weight.grad is not None
    row, column = divmod(int(weight.grad.abs().argmax()), weight.shape[1])
    values = []
    with torch.no_grad():
        for shift in (0.05, -0.1):
            weight[row, column] += shift
            values.append(float(loss()))
    assert (values[0] - values[1]) / 0.1 == pytest.approx(float(weight.grad[row, column]), rel=0.05)


def test_bfloat16_stays_close() -> None:
    wide = Decoder.fresh(tiny(), 3)
    narrow = Decoder.fresh(tiny(), 3, torch.bfloat16)
    ids, places = torch.arange(20), torch.arange(20)
    with torch.no_grad():
        a = wide.logits(wide(ModelInputs(ids, places), attention.packed([20])))
        b = narrow.logits(narrow(ModelInputs(ids, places), attention.packed([20])))
    assert b.dtype == torch.float32
    torch.testing.assert_close(a, b, atol=0.02, rtol=0.1)
