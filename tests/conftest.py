"""What tests of more than one room need: whether results can be exact on this machine."""

from pathlib import Path

import pytest

import turnwise

TINY = Path(next(iter(turnwise.__path__))) / "models" / "tiny"


@pytest.fixture(scope="session")
def engine_is_exact() -> bool:
    """Whether the torch engine proves that batching changes no bit of the embedded model here."""
    from turnwise.engines.decoder import Decoder
    from turnwise.engines.threads import choose_threads

    decoder = Decoder.load(TINY)
    return all(choose_threads(decoder, threads).invariant for threads in (0, 1))


@pytest.fixture
def exact_engine(engine_is_exact: bool) -> None:
    """Skips a test of bitwise equal results where the engine says that it cannot promise them."""
    if not engine_is_exact:
        pytest.skip("the torch engine found no regime on this machine in which batching changes no bit")
