"""A real vLLM: TURNWISE_VLLM_PYTHON is the interpreter that has it (`make test-vllm` makes one)."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """Its path; without one the test is skipped."""
    python = os.environ.get("TURNWISE_VLLM_PYTHON")
    if not python:
        pytest.skip("TURNWISE_VLLM_PYTHON names no interpreter with vLLM; `make test-vllm` makes one")
    assert Path(python).is_file()
    return python
