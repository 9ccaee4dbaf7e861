"""Many SDK agents at once leave nothing behind: files, threads, tasks, sessions."""

import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest

from turnwise.types import StopReason

FILE = Path(__file__).parents[3] / "benchmarks" / "sdk_agents.py"


@pytest.fixture(scope="module")
def benchmark():
    description = importlib.util.spec_from_file_location("sdk_agents_benchmark", FILE)
    module = sys.modules[description.name] = importlib.util.module_from_spec(description)
    description.loader.exec_module(module)
    module.raise_file_limit()
    yield module
    del sys.modules[description.name]


@pytest.mark.parametrize("agents", [50, pytest.param(500, marks=pytest.mark.long)])
def test_agents_at_once_leave_nothing_behind(benchmark, agents):
    found = asyncio.run(benchmark.measure(agents, f"sdk_agents.client={FILE}:frugal_agent"))
    assert [one.failure for one in found.trajectories] == [None] * agents
    assert all(one.stop_reason is StopReason.ANSWERED and len(one.turns) == 2 for one in found.trajectories)
    assert not any(one.branches for one in found.trajectories)
    assert found.after == found.before and found.after.sessions == 0
