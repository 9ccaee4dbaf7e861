"""The recorder: off the loop, one at a time, in order, also for callers that give up."""

import asyncio
import threading

import pytest

from turnwise.storage.index import INDEX, parse_line
from turnwise.storage.recorder import Recorder
from turnwise.storage.run_dir import RunDir
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.types import FinishReason, Message, Role, Sample, StopReason, Trajectory, Turn


@pytest.fixture
def recorder(tmp_path):
    with Recorder(RunDir.create(tmp_path, "a", "train")) as made:
        yield made


def episode(name):
    turn = Turn(0, Message(Role.ASSISTANT, "x"), FinishReason.STOP, 0, 1, 1)
    return Trajectory(Sample(name, (Message(Role.USER, "?"),), "s"), 0, 0, [], [turn], [], StopReason.ANSWERED, 0.1)


def test_the_loop_goes_on_while_something_is_written(recorder):
    """Work that waits for the loop would never end if the loop waited for it."""

    async def main():
        heard = threading.Event()
        asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(heard.set))
        return await recorder.do(heard.wait, 60)

    assert asyncio.run(main())


def test_one_after_the_other_in_the_order_of_asking_by_one_thread(recorder):
    done, threads = [], set()

    def work(number):
        threads.add(threading.get_ident())
        done.append(number)
        return number

    async def main():
        return await asyncio.gather(*(recorder.do(work, number) for number in range(50)))

    assert asyncio.run(main()) == done == list(range(50))
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_a_caller_that_gives_up_does_not_change_the_order(tmp_path):
    gate, done = threading.Event(), []

    def slow():
        gate.wait(60)
        done.append("first")

    async def main(recorder):
        first = asyncio.ensure_future(recorder.do(slow))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        later = asyncio.ensure_future(recorder.do(done.append, "second"))
        gate.set()
        await later

    with Recorder(RunDir.create(tmp_path, "a", "train")) as recorder:
        asyncio.run(main(recorder))
    assert done == ["first", "second"]


def test_the_end_waits_for_what_was_asked_for(tmp_path):
    gate, done = threading.Event(), []

    async def main(recorder):
        task = asyncio.ensure_future(recorder.do(lambda: gate.wait(60) and done.append(1)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with Recorder(RunDir.create(tmp_path, "a", "train")) as recorder:
        asyncio.run(main(recorder))
        assert not done
        gate.set()
    assert done == [1]


def test_trajectories_and_index_are_written_and_errors_come_back(recorder):
    asyncio.run(recorder.record("trajectories/step_000001.parquet", [episode("b")]))
    assert [t.sample.id for t in read_trajectories(recorder.run.path / "trajectories/step_000001.parquet")] == ["b"]
    assert parse_line((recorder.run.path / INDEX).read_text()).size == 1
    with pytest.raises(ZeroDivisionError):
        asyncio.run(recorder.do(lambda: 1 / 0))
