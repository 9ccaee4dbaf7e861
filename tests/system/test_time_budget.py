"""The time budget of an episode on a clock that is moved by hand: what it does counts, what it waits for does not."""

import asyncio
import threading

import pytest

from turnwise.system import time_budget


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose time is the test's."""

    now = 0.0

    def time(self):
        return self.now


@pytest.fixture
def run(monkeypatch):
    """Runs `main(move)` where `move(seconds)` lets time pass."""

    def run(main):
        loops = []

        def factory():
            loops.append(Loop())
            monkeypatch.setattr(time_budget, "clock", loops[0].time)
            return loops[0]

        async def move(seconds):
            loops[0].now += seconds
            for _ in range(8):
                await asyncio.sleep(0)

        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(main(move))

    return run


def test_what_the_block_does_itself_counts(run):
    async def main(move):
        with pytest.raises(TimeoutError):
            async with time_budget.budget(10.0) as deadline:
                await move(9.0)
                assert not deadline.expired()
                await move(2.0)
                pytest.fail("time is up")
        return deadline.expired()

    assert run(main)


def test_waiting_for_a_slot_does_not_count(run):
    async def main(move):
        slots = asyncio.Semaphore(1)
        await slots.acquire()

        async def other():
            await move(100.0)
            slots.release()

        async with time_budget.budget(10.0):
            await move(4.0)
            leaving = asyncio.ensure_future(other())
            async with time_budget.slot(slots):
                await move(4.0)
            await leaving
            await move(1.0)
            reached.append("9 of 10 seconds")
            await move(2.0)
            reached.append("11 of 10 seconds")

    reached = []
    with pytest.raises(TimeoutError):
        run(main)
    assert reached == ["9 of 10 seconds"]


def test_waits_side_by_side_count_once(run):
    async def main(move):
        slots = asyncio.Semaphore(0)

        async def call():
            async with time_budget.slot(slots):
                pass

        async with time_budget.budget(10.0):
            calls = [asyncio.ensure_future(call()) for _ in range(5)]
            await move(0.0)
            await move(100.0)
            for _ in calls:
                slots.release()
            await asyncio.gather(*calls)
            await move(9.0)
            reached.append("9 of 10 seconds")
            await move(2.0)
            reached.append("a wait counted five times")

    reached = []
    with pytest.raises(TimeoutError):
        run(main)
    assert reached == ["9 of 10 seconds"]


def test_a_wait_told_by_another_thread_does_not_count(run):
    async def main(move):
        told = [0.0]
        async with time_budget.budget(10.0) as deadline:
            with time_budget.reported_wait(lambda: told[0]):
                thread = threading.Thread(target=lambda: told.__setitem__(0, 50.0))
                thread.start()
                thread.join()
                await move(59.0)
            await move(0.5)
            return deadline.expired()

    assert run(main) is False


def test_outside_an_episode_waits_are_nobodys(run):
    async def main(move):
        async with time_budget.slot(asyncio.Semaphore(1)):
            with time_budget.reported_wait(lambda: 1.0):
                return "done"

    assert run(main) == "done"


def test_no_budget_is_no_limit(run):
    async def main(move):
        async with time_budget.budget(None):
            await move(1e9)
        return "done"

    assert run(main) == "done"


def test_a_slot_comes_back_whatever_happens(run):
    async def main(move):
        slots = asyncio.Semaphore(1)
        with pytest.raises(ZeroDivisionError):
            async with time_budget.slot(slots):
                raise ZeroDivisionError
        waiter = asyncio.ensure_future(_take(slots))
        async with time_budget.slot(slots):
            await move(0)
            waiter.cancel()
            await asyncio.gather(waiter, return_exceptions=True)
        return slots.locked()

    async def _take(slots):
        async with time_budget.slot(slots):
            pytest.fail("it was cancelled while it waited")

    assert run(main) is False


def test_a_wait_with_hardly_any_time_left_does_not_keep_the_loop_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left stands still meanwhile, however little it is."""
    looks = 0

    def still() -> float:
        nonlocal looks
        looks += 1
        return 0.0

    async def run() -> None:
        async with time_budget.budget(1e-7), time_budget.slot(asyncio.Semaphore(1)):
            await asyncio.sleep(0.5)

    monkeypatch.setattr(time_budget, "clock", still)
    asyncio.run(run())
    assert looks < 100
