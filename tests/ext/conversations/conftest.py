"""The student that learns from files of conversations."""

import sys
from pathlib import Path

import pytest

from turnwise import configure
from turnwise.engines.rendering import make_renderer
from turnwise.training.endpoint_episodes import Student

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "chat")]  # test files are imported by path, what they share by name


@pytest.fixture(scope="session")
def student() -> Student:
    """The bundled model."""
    return Student(make_renderer(configure()), 768, 4096)
