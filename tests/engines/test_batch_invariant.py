"""With any number of threads a row's bits do not depend on its company, and the proof sees it where they do."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from turnwise.engines.model.attention import Chunk, Regime, cached_prefill, exact, pad_rows
from turnwise.engines.model.batch_invariant import CUT, in_whole_rows
from turnwise.engines.model.decoder import ROPE_CHUNK, Decoder, Layer, rope_angles
from turnwise.engines.model.huggingface_folder import DecoderConfig, RopeConfig
from turnwise.engines.model.policy_model import ModelInputs
from turnwise.engines.samplers.cpu.threads import find_regime, holds
from turnwise.engines.samplers.kv_cache import ActiveRows

SHAPES = {
    "wide": DecoderConfig("llama", 200, 32, 4864, 1, 4, 2, 16, 256),
    "odd": DecoderConfig("llama", 200, 256, 683, 1, 4, 2, 64, 256),
    "normed heads": DecoderConfig("qwen3", 300, 96, 1111, 1, 6, 3, 24, 256),
}


@pytest.fixture(params=[1, 3, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """As many threads, more than there are cores too: they cut alike."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(("rows", "width"), [(16, 4864), (320, 333), (160, 683), (5, 2 * CUT + 77)])
@pytest.mark.parametrize("step", [functional.silu, torch.sigmoid])
def test_no_row_depends_on_the_others(threads: int, rows: int, width: int, step: Callable[[Tensor], Tensor]) -> None:
    whole = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(rows))
    gate = whole.chunk(2, dim=-1)[0]
    together = in_whole_rows(step, gate)
    assert torch.allclose(together, step(gate))
    for row in range(rows):
        assert torch.equal(in_whole_rows(step, gate[row : row + 1]), together[row : row + 1]), f"row {row}"


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_sequences_together_have_the_bits_they_have_alone(threads: int, shape: str) -> None:
    decoder = Decoder.fresh(SHAPES[shape], 0)
    regime = find_regime(decoder)
    if regime is None:
        pytest.skip("no regime on this machine rounds alike in every batch")
    drawn = np.random.default_rng(0)
    for count in (13, 60):
        ids = [drawn.integers(0, 200, size=drawn.integers(2, 24)) for _ in range(count)]
        for tokens, states in zip(ids, _states(decoder, ids, regime), strict=True):
            assert torch.equal(_states(decoder, [tokens], regime)[0], states)
            learners = exact([len(tokens)], regime)
            assert torch.equal(decoder(_inputs([tokens], regime), learners)[: len(tokens)], states)


def _inputs(ids: list[NDArray[np.int64]], regime: Regime) -> ModelInputs:
    places = torch.cat([torch.arange(len(tokens)) for tokens in ids])
    return ModelInputs(pad_rows(torch.from_numpy(np.concatenate(ids)), regime), pad_rows(places, regime))


def _states(decoder: Decoder, ids: list[NDArray[np.int64]], regime: Regime) -> list[Tensor]:
    """The last states of prompts that are prefilled together."""
    rows = ActiveRows(decoder.shape.caches, torch.float32, len(ids))
    rows.reserve(len(ids), 32)
    chunks = [Chunk(row, 0, len(tokens)) for row, tokens in enumerate(ids)]
    states: Tensor = decoder(_inputs(ids, regime), cached_prefill(rows, chunks, regime))
    lengths = [len(tokens) for tokens in ids]
    return list(states[: sum(lengths)].split(lengths))


def test_the_table_of_angles_grows_without_changing(threads: int) -> None:
    """What a sampler built for short conversations and a learner for long ones must turn alike."""
    short, long = (rope_angles(RopeConfig(10000.0), 88, count * ROPE_CHUNK) for count in (1, 3))
    for one, other in zip(short, long, strict=True):
        assert torch.equal(one, other[:ROPE_CHUNK])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_proof_fails_where_a_cut_shows(threads: int, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the scalar tail at the end of each thread's share, which rounds otherwise on some processors."""
    decoder = Decoder.fresh(SHAPES[shape], 0)
    regime = find_regime(decoder)
    if regime is None:
        pytest.skip("no regime on this machine rounds alike in every batch")

    def cut(layer: Layer, gate: Tensor) -> Tensor:
        made = functional.silu(gate)
        shares = min(threads, -(-gate.numel() // CUT))
        for share in range(1, shares):
            made.view(-1)[share * -(-gate.numel() // shares) - 1] *= 1.001
        return made

    monkeypatch.setattr(Layer, "activated", cut)
    assert holds(decoder, regime) is (threads == 1)
