"""Signals in one process: the first cancels and lets everything close, a second one ends it at once."""

import asyncio
import inspect
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from turnwise.system.stopping import Stopped, first_signal, run_stoppable, stoppable


def send() -> None:
    """SIGTERM: SIGINT may be ignored here, as in the background of a script."""
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_cancels_and_what_was_opened_is_closed() -> None:
    closed = []

    async def work() -> None:
        try:
            send()
            await asyncio.sleep(600)
        except asyncio.CancelledError as error:
            closed.append(str(error))
            raise

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match="stopped by SIGTERM") as caught:
        run_stoppable(work())
    assert caught.value.exit_code == 143 and closed == ["stopped by SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_wakes_a_loop_that_waits() -> None:
    async def work() -> None:
        threading.Timer(0.2, send).start()
        await asyncio.Event().wait()

    with pytest.raises(Stopped):
        run_stoppable(work())


def test_a_second_signal_ends_what_does_not_want_to_end() -> None:
    closed = []

    async def work() -> None:
        send()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            send()
            closed.append("never said")
        finally:
            closed.append("closed")

    with pytest.raises(Stopped):
        run_stoppable(work())
    assert closed == ["closed"]


def test_a_loop_that_does_not_turn_is_interrupted_in_what_it_does() -> None:
    async def work() -> None:
        send()
        time.sleep(600)

    with pytest.raises(Stopped, match="SIGTERM"):
        run_stoppable(work())


def test_work_that_ends_in_spite_of_it_has_its_result() -> None:
    async def work() -> str:
        send()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            return "done"
        return "woken"

    assert run_stoppable(work()) == "done"


def test_a_cancellation_without_a_signal_stays_one() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_stoppable(work())


def test_the_first_signal_can_be_a_kind_word_and_the_second_is_not() -> None:
    said = []

    async def work() -> None:
        asked = asyncio.Event()
        with first_signal(asked.set):
            send()
            await asked.wait()
            said.append("asked")
            send()
            await asyncio.sleep(600)

    with pytest.raises(Stopped):
        run_stoppable(work())
    assert said == ["asked"]


def test_outside_a_loop_it_is_raised_where_it_is() -> None:
    with pytest.raises(Stopped):
        with stoppable():
            send()
            raise AssertionError("it was not raised")


def test_in_another_thread_nothing_is_set() -> None:
    found = []

    async def work() -> str:
        return "done"

    thread = threading.Thread(target=lambda: found.append(run_stoppable(work())))
    thread.start()
    thread.join()
    assert found == ["done"]


def test_work_that_was_never_begun_is_closed_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        raise AssertionError("never begun")

    def run(_: object) -> None:
        raise Stopped(signal.SIGTERM)  # a signal that comes before the first line

    waiting = work()
    monkeypatch.setattr(asyncio, "run", run)
    with pytest.raises(Stopped):
        run_stoppable(waiting)
    assert inspect.getcoroutinestate(waiting) == inspect.CORO_CLOSED


def in_a_running_loop(call: Callable[[], object]) -> object:
    """As a notebook's cell calls it."""

    async def cell() -> object:
        return call()

    return asyncio.run(cell())


def test_in_a_running_loop_the_work_has_a_thread_and_a_loop_of_its_own() -> None:
    async def work() -> tuple[str, int]:
        await asyncio.sleep(0)
        return threading.current_thread().name, id(asyncio.get_running_loop())

    def twice() -> list[object]:
        return [run_stoppable(work()), id(asyncio.get_running_loop())]

    (name, its_loop), loop = in_a_running_loop(twice)  # type: ignore[misc]
    assert name == "turnwise-loop" and its_loop != loop


def test_in_a_running_loop_an_error_reaches_the_caller() -> None:
    async def work() -> None:
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        in_a_running_loop(lambda: run_stoppable(work()))


def test_in_a_running_loop_a_signal_cancels_the_work() -> None:
    closed = []

    async def work() -> None:
        threading.Timer(0.2, send).start()
        try:
            await asyncio.sleep(600)
        finally:
            closed.append(True)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match="SIGTERM"):
        in_a_running_loop(lambda: run_stoppable(work()))
    assert closed == [True] and signal.getsignal(signal.SIGTERM) is before


def test_in_a_running_loop_the_first_signal_is_the_works_own_and_the_second_cancels_it() -> None:
    acts = []

    async def work() -> None:
        first = asyncio.Event()
        with first_signal(first.set):
            threading.Timer(0.2, send).start()
            await first.wait()
            acts.append("first")
            threading.Timer(0.2, send).start()
            await asyncio.sleep(600)

    with pytest.raises(Stopped, match="SIGTERM"):
        in_a_running_loop(lambda: run_stoppable(work()))
    assert acts == ["first"]
