"""Episodes whose agent is a function of the test, written against a real SDK."""

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # test files are imported by path


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], str]:
    """Makes a function the value of `sdk_agents.client`."""

    def named(function: Callable[..., Any]) -> str:
        module = types.ModuleType("turnwise_test_agent")
        module.run = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return f"{module.__name__}:run"

    return named
