"""The exact kernel computes ordinary attention, differentiably, and reproduces itself in pieces."""

import numpy as np
import pytest
import torch

from turnwise.engines.model import attention
from turnwise.engines.model.attention import Chunk, Regime, pad_rows
from turnwise.engines.model.checkpoint_format import DecoderConfig
from turnwise.engines.model.decoder import PLAIN, Decoder
from turnwise.engines.model.policy_model import ModelInputs
from turnwise.engines.samplers.exactness import find_regime
from turnwise.engines.samplers.kv_cache import ActiveRows
from turnwise.engines.samplers.steps import decode, prefill


@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("rows", [2, 4, 64])
def test_exact_equals_packed(heads: int, shared: int, rows: int) -> None:
    lengths = [1, 30, 300, 64]
    noise = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), count, 8, generator=noise) for count in (heads, shared, shared))
    reference = attention.packed(lengths)(0, q, k, v, PLAIN)
    padding = torch.zeros(5, heads, 8)
    padded = [torch.cat((x, padding[:, : x.shape[1]])) for x in (q, k, v)]
    actual = attention.exact(lengths, Regime(16, rows, 128))(0, *padded, PLAIN)
    torch.testing.assert_close(actual[: len(q)], reference, atol=1e-5, rtol=1e-5)
    assert not actual[len(q) :].any()


def test_exact_has_the_gradient_of_packed(decoder: Decoder) -> None:
    lengths = [20, 44]
    ids = torch.randint(0, 96, (64,), generator=torch.Generator().manual_seed(0))
    gradients = []
    for attend in (attention.packed(lengths), attention.exact(lengths, Regime(16, 32, 32))):
        decoder.zero_grad()
        logits = decoder.logits(decoder(ModelInputs(ids, attention.positions(lengths)), attend))
        torch.nn.functional.cross_entropy(logits, ids.roll(-1)).backward()
        gradients.append({name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None})
    decoder.zero_grad()
    assert gradients[0].keys() == dict(decoder.named_parameters()).keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-3)


def test_a_table_built_while_sampling_serves_training() -> None:
    made = Decoder.fresh(DecoderConfig("llama", 32, 32, 64, 1, 2, 2, 16, 128), 0)
    ids = torch.arange(20)
    with torch.inference_mode():
        made(ModelInputs(ids, ids), attention.packed([20]))
    made(ModelInputs(ids, ids), attention.packed([20])).sum().backward()
    assert made.embed.grad is not None and made.embed.grad[:20].abs().sum() > 0


@pytest.mark.parametrize("shared", [4, 2, 1])
def test_pieces_and_batches_equal_the_whole(shared: int, regime: Regime) -> None:
    config = DecoderConfig("llama", 100, 64, 96, 2, 4, shared, 16, 1024)
    made = Decoder.fresh(config, 1)
    regime = find_regime(made) or regime
    tokens = np.random.default_rng(0).integers(100, size=330)
    with torch.inference_mode():
        padded = [pad_rows(x, regime) for x in (torch.from_numpy(tokens), torch.arange(330))]
        whole = made.logits(made(ModelInputs(*padded), attention.exact([330], regime)))
        rows = ActiveRows(made.shape.caches, torch.float32, 3)
        rows.reserve(3, 700)
        chunks = [Chunk(0, 0, 1), Chunk(1, 0, 100), Chunk(2, 0, 320)]
        first = prefill(made, rows, chunks, [tokens[:1], tokens[:100], tokens[:320]], regime)
        assert torch.equal(first, whole[[0, 99, 319]])
        # Neighbours of unlike length, then one of a kind, in any order of rows.
        second = prefill(made, rows, [Chunk(1, 100, 257), Chunk(0, 1, 40)], [tokens[100:257], tokens[1:40]], regime)
        assert torch.equal(second, whole[[256, 39]])
        for shift in range(5):
            places = np.array([40, 257, 320]) + shift
            assert torch.equal(decode(made, rows, tokens[places], places, regime), whole[places.tolist()])
