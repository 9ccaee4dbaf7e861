"""What tests of vLLM share with those of servers and of our own engines is found by name."""

import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS / "ext" / "servers"), str(TESTS / "engines")]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Two OpenMP threads on two busy cores are many times slower than one."""
    torch.set_num_threads(1)
