"""Small decoders shared by the engine tests, and the proof that bitwise assertions may be made here."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from turnwise.engines.model.attention import Regime
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.huggingface_folder import DecoderConfig
from turnwise.engines.samplers.cpu.threads import find_regime
from turnwise.system import time_budget

sys.path.insert(0, str(Path(__file__).parent))  # test files are imported by path; what they share is found by name

SHARP = 9.0
"""Scales random weights so that distributions have contrast."""


@pytest.fixture(scope="session")
def decoder() -> Decoder:
    """A sharp random Qwen3 with grouped heads; vocabulary 96, context 512."""
    config = DecoderConfig("qwen3", 96, 64, 128, 2, 4, 2, 16, 512)
    made = Decoder.fresh(config, 11)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" not in name:
                parameter.mul_(SHARP)
    return made


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Two OpenMP threads on two busy cores are many times slower than one."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def regime(decoder: Decoder, one_thread: None) -> Regime:
    """The regime proven for `decoder`; skips a test of bitwise equality where this machine has none."""
    found = find_regime(decoder)
    if found is None:
        pytest.skip("no regime on this machine rounds alike in every batch, so there is no bitwise equality to test")
    return found


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The clock that a batcher reads, for a test to set; within it is as in a sampler's worker."""
    time = [0.0]
    monkeypatch.setattr(time_budget, "clock", lambda: time[0])
    with torch.inference_mode():
        yield time
