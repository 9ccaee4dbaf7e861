"""Code that is not ours runs apart: it can be stopped, and nothing it raises brings the event loop down."""

import asyncio
import threading

import pytest

from turnwise.rollout import plugin_calls
from turnwise.rollout.plugin_calls import PluginCallError, TookTooLong


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(plugin_calls, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(plugin_calls, "_leaked", [])


async def value(given):
    await asyncio.sleep(0)
    return given


async def fail(error):
    await asyncio.sleep(0)
    raise error


async def forever():
    await asyncio.Event().wait()


def test_functions_of_both_kinds_are_called():
    def sync(a, *, function):
        return a + function + (threading.current_thread() is threading.main_thread())

    async def main():
        assert await plugin_calls.call(value, 3) == 3
        assert await plugin_calls.call(sync, 1, function=2) == 3, (
            "apart from the loop's thread; any name is a fine name"
        )
        assert await plugin_calls.call(lambda: value(4)) == 4, "a coroutine made by a plain function is awaited"

    asyncio.run(main())


@pytest.mark.parametrize("error", [SystemExit(1), GeneratorExit("odd"), KeyboardInterrupt("k"), StopIteration(1)])
def test_a_thread_brings_every_error_home_as_an_ordinary_one(error):
    def fails():
        raise error

    with pytest.raises(PluginCallError, match=type(error).__name__) as caught:
        asyncio.run(plugin_calls.in_thread(fails))
    assert caught.value.__cause__ is error


def test_a_task_brings_exit_home_as_an_ordinary_error():
    with pytest.raises(PluginCallError, match="SystemExit: 7"):
        asyncio.run(plugin_calls.in_task(fail(SystemExit(7))))


def test_an_interrupt_from_the_keyboard_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(plugin_calls.in_task(fail(KeyboardInterrupt())))


def test_ordinary_errors_stay_what_they_are():
    for error in (ValueError("v"), TimeoutError("its own")):
        with pytest.raises(type(error), match=str(error)):
            asyncio.run(plugin_calls.in_task(fail(error), 10))


def test_a_task_that_cancels_itself_does_not_cancel_the_caller():
    async def main():
        with pytest.raises(PluginCallError, match="cancelled itself"):
            await plugin_calls.in_task(fail(asyncio.CancelledError()))
        assert not asyncio.current_task().cancelling()

    asyncio.run(main())


def test_time_that_has_passed_is_told_apart_from_the_codes_own_timeout():
    with pytest.raises(TookTooLong):
        asyncio.run(plugin_calls.in_task(forever(), 0.01))


def test_a_value_that_comes_after_the_time_is_not_taken():
    async def late():
        try:
            await forever()
        except asyncio.CancelledError:
            return "late"

    with pytest.raises(TookTooLong):
        asyncio.run(plugin_calls.in_task(late(), 0.01))


def test_cancelling_the_caller_stops_the_code_and_waits_for_its_clean_up(monkeypatch):
    monkeypatch.setattr(plugin_calls, "GRACE_SECONDS", 20.0)
    steps = []

    async def tidy():
        try:
            await forever()
        finally:
            await asyncio.sleep(0.01)
            steps.append("cleaned")

    async def main():
        task = asyncio.ensure_future(plugin_calls.in_task(tidy()))
        await asyncio.sleep(0.001)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        steps.append("cancelled")

    asyncio.run(main())
    assert steps == ["cleaned", "cancelled"]


def test_code_that_ignores_cancellation_is_left_behind_and_counted(monkeypatch):
    monkeypatch.setattr(plugin_calls, "MAX_LEAKED", 2)

    async def main():
        stop = asyncio.Event()

        async def stubborn():
            while not stop.is_set():
                try:
                    await stop.wait()
                except asyncio.CancelledError:
                    continue

        for _ in range(2):
            with pytest.raises(TookTooLong):
                await plugin_calls.in_task(stubborn(), 0.01)
        with pytest.raises(Exception, match="2 calls of tools or users still run after their timeout"):
            plugin_calls.check_leaked()
        stop.set()
        await asyncio.sleep(0.01)
        plugin_calls.check_leaked()

    asyncio.run(main())


def test_code_that_is_left_behind_does_not_keep_the_run_from_ending():
    async def stubborn():
        while True:
            try:
                await forever()
            except asyncio.CancelledError:
                continue

    async def main():
        with pytest.raises(TookTooLong):
            await plugin_calls.in_task(stubborn(), 0.01)

    asyncio.run(main())  # which waits for every task that it knows


def test_a_cancelled_thread_is_counted_until_it_ends(monkeypatch):
    monkeypatch.setattr(plugin_calls, "MAX_LEAKED", 1)
    release = threading.Event()

    async def main():
        task = asyncio.ensure_future(plugin_calls.in_thread(lambda: release.wait(30)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(Exception, match="still run after their timeout"):
            plugin_calls.check_leaked()

    asyncio.run(main())
    release.set()
    plugin_calls._leaked[0].join(10)
    plugin_calls.check_leaked()


def test_a_thread_that_ended_before_its_caller_was_cancelled_is_not_counted(monkeypatch):
    """The result is there, its caller not yet awake, when the cancellation comes."""
    settle = plugin_calls._settle

    async def main():
        task = asyncio.ensure_future(plugin_calls.in_thread(lambda: 1))

        def settle_and_cancel(*args):
            settle(*args)
            task.cancel()

        monkeypatch.setattr(plugin_calls, "_settle", settle_and_cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert plugin_calls._leaked == []

    asyncio.run(main())


def test_a_loop_that_has_closed_meanwhile_is_no_error(recwarn):
    release = threading.Event()

    async def main():
        task = asyncio.ensure_future(plugin_calls.in_thread(lambda: release.wait(30)))
        await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(main())
    release.set()
    plugin_calls._leaked[0].join(10)
    assert not plugin_calls._leaked[0].is_alive()
    assert [w for w in recwarn if "thread" in str(w.message).lower()] == []


def test_to_the_end_finishes_whatever_happens():
    async def main():
        done = []

        async def work():
            await asyncio.sleep(0.02)
            done.append(True)
            return 5

        assert await plugin_calls.to_the_end(work()) == 5
        task = asyncio.ensure_future(plugin_calls.to_the_end(work()))
        for _ in range(4):
            await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(done) == 2
        with pytest.raises(ValueError):
            await plugin_calls.to_the_end(fail(ValueError()))

    asyncio.run(main())
