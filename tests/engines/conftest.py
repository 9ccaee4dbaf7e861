"""Small decoders shared by the engine tests, and the proof that bitwise assertions may be made here."""

import pytest
import torch

from turnwise.engines.checkpoint_format import DecoderConfig
from turnwise.engines.decoder import Decoder
from turnwise.engines.threads import prove_row_invariance

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
def invariant(decoder: Decoder, one_thread: None) -> None:
    """Skips a test of bitwise equality where this machine's arithmetic does not allow it."""
    if not prove_row_invariance(decoder):
        pytest.skip("rows of a matrix product depend on the batch on this machine")
