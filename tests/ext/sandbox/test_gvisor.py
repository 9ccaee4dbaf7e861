"""The sandbox inside gVisor, where runsc is installed."""

import asyncio
import shutil

import pytest

from turnwise.ext.sandbox import gvisor
from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.pool import PoolSettings, SandboxPool
from turnwise.ext.sandbox.results import ExecutionStatus, InputImage
from turnwise.ext.sandbox.zygote_process import SandboxUnavailable

SETTINGS = PoolSettings(level=SandboxLevel.L4, preload=(), warm=0)


@pytest.mark.skipif(shutil.which("runsc") is None, reason="gVisor's runsc is not installed")
def test_sessions_run_on_another_kernel() -> None:
    async def body() -> None:
        async with SandboxPool(SETTINGS) as pool:
            assert pool.report.level is SandboxLevel.L4
            image = InputImage("raw", bytes(range(12)), "RGB", (2, 2))
            async with pool.session(images=[image]) as session, pool.session() as other:
                assert (await session.run("x = 6\nimg0.size")).value == "(2, 2)"
                assert (await session.run("x * 7")).value == "42"
                assert (await other.run("'x' in globals()")).value == "False"
                stopped = await session.run("while True: pass", 0.3)
                assert (stopped.status, stopped.kept) == (ExecutionStatus.TIMEOUT, True)
                ended = await session.run("import os\nos._exit(3)")
                assert (ended.status, ended.kept) == (ExecutionStatus.KILLED, False)
                assert (await session.run("1 + 1")).value == "2"

    asyncio.run(body())


def test_without_runsc_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gvisor.shutil, "which", lambda name: None)

    async def body() -> None:
        async with SandboxPool(SETTINGS):
            pass

    with pytest.raises(SandboxUnavailable, match="level=L4 is not available here.*\n.*no runsc.*install"):
        asyncio.run(body())
