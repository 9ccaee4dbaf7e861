"""Tools that hang, block or wait: stopped in time, side by side, and within their own limits."""

import asyncio
import threading

import pytest

from turnwise.config import RolloutConfig
from turnwise.errors import EpisodeError, PluginError
from turnwise.rollout import plugin_calls
from turnwise.rollout.toolbox.toolbox import Toolbox
from turnwise.rollout.tools.tool import tool
from turnwise.types import CallStatus, Sample, ToolCall


@tool(timeout=0.05)
async def hangs() -> str:
    """Never come back."""
    await asyncio.Event().wait()
    return ""


def test_a_hanging_coroutine_is_stopped(one):
    reply, record = one(hangs)
    assert record.status is CallStatus.TIMEOUT
    assert reply.text == "Error: hangs took longer than 0.05 s"


def test_a_hanging_thread_is_left_behind_and_the_loop_goes_on(one):
    release = threading.Event()

    @tool(timeout=0.05)
    def blocks() -> str:
        """Block."""
        release.wait(30)
        return "late"

    try:
        _, record = one(blocks)
        assert record.status is CallStatus.TIMEOUT
    finally:
        release.set()


def test_a_coroutine_that_ignores_cancellation_is_left_behind(monkeypatch):
    monkeypatch.setattr(plugin_calls, "GRACE_SECONDS", 0.05)
    stop = False

    @tool(timeout=0.05)
    async def stubborn() -> str:
        """Go on whatever happens."""
        while not stop:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return "late"

    async def main():
        nonlocal stop
        box = Toolbox([stubborn], RolloutConfig())
        records = []
        await box.open(Sample("s", (), "test"), ["stubborn"]).call([ToolCall("t", "stubborn", {})], records)
        stop = True
        return records[0].status

    assert asyncio.run(main()) is CallStatus.TIMEOUT


def test_too_many_hanging_calls_stop_the_run(monkeypatch, one):
    monkeypatch.setattr(plugin_calls, "MAX_LEAKED", 3)
    monkeypatch.setattr(plugin_calls, "_leaked", [])
    release = threading.Event()

    @tool(timeout=0.01)
    def blocks() -> str:
        """Block."""
        release.wait(30)
        return "late"

    try:
        for _ in range(3):
            assert one(blocks)[1].status is CallStatus.TIMEOUT
        with pytest.raises(PluginError, match="3 calls of tools or users still run after their timeout"):
            one(blocks)
    finally:
        release.set()
    for thread in [entry for entry in plugin_calls._leaked if isinstance(entry, threading.Thread)]:
        thread.join(10)
    assert one(blocks)[1].status is CallStatus.OK, "those that came back are no longer counted"


def test_the_configured_timeout_replaces_the_tools_own(one):
    assert one(hangs, tool_timeout=0.01)[0].text.endswith("longer than 0.01 s")


def test_waiting_for_a_slot_does_not_count_as_the_tools_time(run):
    @tool(timeout=5, concurrency=1)
    async def slow() -> str:
        """Take a while."""
        await asyncio.sleep(0.06)
        return "done"

    _, records = run([slow], [ToolCall(f"t{n}", "slow", {}) for n in range(8)], tool_timeout=0.4)
    assert [record.status for record in records] == [CallStatus.OK] * 8


# --- side by side -------------------------------------------------------------------------------------------------


def test_parallel_calls_run_side_by_side_and_keep_their_order(run):
    barrier = None

    @tool
    async def meet(number: int) -> str:
        """Wait for all the others: alone, this would never end."""
        nonlocal barrier
        barrier = barrier or asyncio.Barrier(8)
        await barrier.wait()
        await asyncio.sleep((8 - number) / 500)
        return f"number {number}"

    replies, records = run([meet], [ToolCall(f"t{n}", "meet", {"number": n}) for n in range(8)], tool_timeout=20)
    assert [reply.text for reply in replies] == [f"number {n}" for n in range(8)]
    assert [reply.tool_call_id for reply in replies] == [f"t{n}" for n in range(8)]
    assert [record.call.id for record in records] == [f"t{n}" for n in range(8)]


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_concurrency_of_a_tool_is_respected_over_all_episodes(kind):
    busy = most = 0
    lock = threading.Lock()

    def enter(step):
        nonlocal busy, most
        with lock:
            busy += step
            most = max(most, busy)

    threads, tasks = threading.Barrier(3), asyncio.Barrier(3)  # three must be under way at once, or nobody goes on

    async def work():
        """Work."""
        enter(1)
        await tasks.wait()
        enter(-1)
        return "ok"

    def sync_work():
        """Work."""
        enter(1)
        threads.wait(20)
        enter(-1)
        return "ok"

    chosen = tool(name="work", concurrency=3)(work if kind == "async" else sync_work)

    async def main():
        episodes = [box.open(Sample(f"s{n}", (), "test"), ["work"]) for n in range(9)]
        records = []
        await asyncio.gather(*(e.call([ToolCall("a", "work", {})] * 2, records) for e in episodes))
        assert [record.status for record in records] == [CallStatus.OK] * 18
        assert most == 3

    box = Toolbox([chosen], RolloutConfig())
    asyncio.run(main())
    if kind == "sync":
        asyncio.run(main())  # slots belong to an event loop and are made anew for the second


def test_a_slow_tool_does_not_hold_up_another(run):
    gate = asyncio.Event()

    @tool(concurrency=1)
    async def slow() -> str:
        """Wait for the quick one."""
        await gate.wait()
        return "slow"

    @tool(concurrency=1)
    async def quick() -> str:
        """Let the slow one go."""
        gate.set()
        return "quick"

    replies, _ = run([slow, quick], [ToolCall("a", "slow", {}), ToolCall("b", "quick", {})], tool_timeout=20)
    assert [reply.text for reply in replies] == ["slow", "quick"]


def test_blocking_tools_do_not_hold_up_each_other(run):
    barrier = threading.Barrier(6)

    @tool
    def meet() -> str:
        """Block until six calls block."""
        barrier.wait(20)
        return "met"

    replies, _ = run([meet], [ToolCall(f"t{n}", "meet", {}) for n in range(6)])
    assert {reply.text for reply in replies} == {"met"}


def test_one_failure_of_the_infrastructure_stops_the_other_calls(run):
    stopped = []

    @tool
    async def waits() -> str:
        """Wait."""
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(True)
        return ""

    @tool
    async def fails() -> str:
        """Fail."""
        await asyncio.sleep(0.01)
        raise EpisodeError("gone")

    with pytest.raises(EpisodeError, match="gone"):
        run([waits, fails], [ToolCall("a", "waits", {}), ToolCall("b", "fails", {})])
    assert stopped == [True]
