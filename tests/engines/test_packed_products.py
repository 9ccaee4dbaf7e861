"""Products with weights laid out for the CPU are the plain ones but for rounding, and follow new weights."""

import numpy as np
import pytest
import torch
from torch import Tensor

from turnwise.engines.model import attention, decoder
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.huggingface_folder import DecoderConfig
from turnwise.engines.model.policy_model import ModelInputs

CONFIG = DecoderConfig("qwen2", 96, 64, 128, 2, 4, 2, 16, 512, qkv_bias=True)


@torch.inference_mode()
def logits(model: Decoder, count: int) -> Tensor:
    ids = torch.from_numpy(np.random.default_rng(0).integers(96, size=count))
    return model.logits(model(ModelInputs(ids, torch.arange(count)), attention.packed([count])))


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_they_are_the_plain_ones_but_for_rounding_and_follow_new_weights(dtype: torch.dtype, near: float) -> None:
    model, other = Decoder.fresh(CONFIG, 1, dtype), Decoder.fresh(CONFIG, 2, dtype)
    plain = {count: logits(model, count) for count in (1, 6, 40)}
    if not model.pack_products():
        pytest.skip(f"this torch has no layout for products in {dtype} on this processor")
    for count, expected in plain.items():
        torch.testing.assert_close(logits(model, count), expected, atol=near, rtol=near)
    with torch.inference_mode():
        model.load(other.weights())
    torch.testing.assert_close(logits(model, 6), logits(other, 6), atol=near, rtol=near)
    assert not torch.allclose(logits(model, 6), plain[6], atol=near, rtol=near)


def test_a_layout_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "packed_linear", lambda x, packed, bias: 2 * (x @ packed.to_dense().t()))
    assert decoder.pack(torch.randn(8, 16, generator=torch.Generator().manual_seed(0))) is None
    assert decoder.pack(torch.ones(8, 16, dtype=torch.float64)) is None
    model = Decoder.fresh(CONFIG, 1)
    before = logits(model, 6)
    assert not model.pack_products() and torch.equal(logits(model, 6), before)
