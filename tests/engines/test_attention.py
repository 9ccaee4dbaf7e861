"""The exact kernel computes ordinary attention, differentiably, and reproduces itself in pieces."""

import numpy as np
import pytest
import torch

from turnwise.engines.model import attention
from turnwise.engines.model.attention import Chunk, Regime, pad_rows
from turnwise.engines.model.decoder import PLAIN, Decoder
from turnwise.engines.model.huggingface_folder import DecoderConfig
from turnwise.engines.model.policy_model import LayerCache, Mixing, ModelInputs
from turnwise.engines.samplers.cpu.steps import decode, prefill
from turnwise.engines.samplers.cpu.threads import find_regime
from turnwise.engines.samplers.kv_cache import ActiveRows


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


MIXINGS = {
    "scale": Mixing(scale=0.4),
    "window": Mixing(window=7),
    "sinks": Mixing(sinks=torch.tensor([1.5, -0.5, 0.0, 3.0])),
    "window and sinks": Mixing(window=40, sinks=torch.tensor([1.5, -0.5, 0.0, 3.0])),
    "soft cap": Mixing(softcap=1.2, window=50),
}


def _plainly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mixing: Mixing) -> torch.Tensor:
    """One query at a time, one head at a time."""
    rows = []
    for place in range(len(q)):
        first = 0 if mixing.window is None else max(0, place + 1 - mixing.window)
        heads = []
        for head in range(q.shape[1]):
            shared = head * k.shape[1] // q.shape[1]
            scores = k[first : place + 1, shared] @ q[place, head] * (mixing.scale or q.shape[2] ** -0.5)
            if mixing.softcap is not None:
                scores = mixing.softcap * torch.tanh(scores / mixing.softcap)
            if mixing.sinks is not None:
                scores = torch.cat((scores, mixing.sinks[head : head + 1]))
            weights = torch.softmax(scores, dim=-1)[: place + 1 - first]
            heads.append(weights @ v[first : place + 1, shared])
        rows.append(torch.cat(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("kind", MIXINGS)
def test_every_way_of_mixing_is_the_same_packed_whole_and_in_pieces(kind: str, regime: Regime) -> None:
    mixing, length = MIXINGS[kind], 90
    noise = torch.Generator().manual_seed(2)
    shapes = ((4, 16), (2, 16), (2, 12))  # values may be narrower than keys
    q, k, v = (torch.randn(length, *shape, generator=noise) for shape in shapes)
    whole = attention.exact([length], regime)(0, q, k, v, mixing)
    torch.testing.assert_close(whole, _plainly(q, k, v, mixing), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(attention.packed([length])(0, q, k, v, mixing), whole, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(whole, attention.exact([length], regime)(0, q, k, v, Mixing()), atol=1e-2)
    two = attention.packed([30, 60])(0, q, k, v, mixing)[:30]
    torch.testing.assert_close(two, whole[:30], atol=1e-5, rtol=1e-4)
    rows = ActiveRows([LayerCache(2, 16, 12)], torch.float32, 2)
    rows.reserve(2, 100)
    parts = []
    for start, end in ((0, 33), (33, 80)):
        chunks = [Chunk(0, start, end), Chunk(1, start, end)]
        twice = [torch.cat((x[start:end], x[start:end])) for x in (q, k, v)]
        parts.append(attention.cached_prefill(rows, chunks, regime)(0, *twice, mixing).view(2, end - start, -1))
    for place in range(80, length):
        twice = [x[[place, place]] for x in (q, k, v)]
        attend = attention.cached_decode(rows, torch.tensor([place, place]), regime)
        parts.append(attend(0, *twice, mixing).view(2, 1, -1))
    pieces = torch.cat(parts, dim=1)
    torch.testing.assert_close(pieces[0], whole, atol=1e-6, rtol=1e-5)
    assert torch.equal(pieces[0], pieces[1])
    if mixing.softcap is None:  # a tanh may round otherwise at the end of a vector
        assert torch.equal(pieces[0], whole)
