"""The collector: start order, bounds that are counted and not timed, failures that come out, nothing left running."""

import asyncio
import gc
import weakref

import pytest

from turnwise.rollout.collector import Collector
from turnwise.types import Group, Sample


class Runs:
    """Groups that finish when told to; counts how many run and how many have been started."""

    def __init__(self):
        self.gates = {}
        self.running = 0
        self.most = 0
        self.started = []
        self.cancelled = []

    async def __call__(self, sample):
        self.running += 1
        self.most = max(self.most, self.running)
        self.started.append(sample.id)
        try:
            await asyncio.sleep(0)
            await self.gates.setdefault(sample.id, asyncio.Event()).wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # clean-up takes a moment
            self.cancelled.append(sample.id)
            raise
        finally:
            self.running -= 1
        if "bad" in sample.id:
            raise ZeroDivisionError(sample.id)
        return Group(sample, [])

    def open(self, *names):
        for name in names:
            self.gates.setdefault(name, asyncio.Event()).set()


def samples(count):
    return [Sample(f"s{n}", (), "t") for n in range(count)]


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


def ids(groups):
    return [group.sample.id for group in groups]


def test_groups_come_in_start_order_whatever_finishes_first():
    async def main():
        runs = Runs()
        async with Collector(samples(5), runs, running=5, ahead=5) as collector:
            for name in ("s4", "s2", "s3", "s1", "s0"):
                runs.open(name)
                await settle()
            assert ids(await collector.next_groups(2)) == ["s0", "s1"]
            assert ids(await collector.next_groups(10)) == ["s2", "s3", "s4"]
            assert await collector.next_groups(1) == []

    asyncio.run(main())


@pytest.mark.parametrize(("running", "ahead"), [(1, 1), (1, 4), (3, 3), (3, 7), (8, 2)])
def test_bounds_on_running_and_ahead_are_kept(running, ahead):
    async def main():
        runs, taken = Runs(), 0
        runs.open(*(f"s{n}" for n in range(20)))
        async with Collector(samples(20), runs, running=running, ahead=ahead) as collector:
            while groups := await collector.next_groups(1):
                taken += len(groups)
                await settle()
                assert len(runs.started) <= taken + ahead
        assert taken == 20
        assert runs.most == min(running, ahead)

    asyncio.run(main())


def test_it_says_what_is_finished_and_what_would_be_waited_for():
    async def main():
        runs = Runs()
        async with Collector(samples(6), runs, running=4, ahead=4) as collector:
            assert (collector.finished, collector.unfinished(3)) == (0, 3)
            runs.open("s1", "s2", "s3")
            await settle()
            assert (collector.finished, collector.unfinished(3)) == (3, 1), "the oldest is waited for, in its turn"
            runs.open("s0")
            assert ids(await collector.next_groups(3)) == ["s0", "s1", "s2"]
            await settle()
            assert (collector.finished, collector.unfinished(2), collector.unfinished(9)) == (1, 1, 8)

    asyncio.run(main())


def test_a_finished_group_makes_room_before_it_is_handed_out():
    async def main():
        runs = Runs()
        async with Collector(samples(9), runs, running=2, ahead=4):
            await settle()
            assert runs.started == ["s0", "s1"]
            runs.open("s1")
            await settle()
            assert runs.started == ["s0", "s1", "s2"]
            runs.open("s2", "s3")
            await settle()
            assert runs.started == ["s0", "s1", "s2", "s3"], "four ahead are enough"

    asyncio.run(main())


def test_a_played_group_gives_up_its_slot_before_it_is_scored():
    """Play and scoring each have `running` slots; a judge that hangs stops neither play nor its bound."""

    async def main():
        runs, scores = Runs(), Runs()

        async def score(group):
            await scores(group.sample)

        runs.open(*(f"s{n}" for n in range(9)))
        async with Collector(samples(9), runs, running=2, ahead=6, score=score) as collector:
            await settle()
            await settle()
            assert scores.started == ["s0", "s1"] and scores.running == 2
            assert runs.started == [f"s{n}" for n in range(6)], "played as far ahead as may be, none scored yet"
            assert runs.running == 0
            scores.open("s1")
            await settle()
            assert scores.started == ["s0", "s1", "s2"], "start order, whatever is scored first"
            scores.open(*(f"s{n}" for n in range(9)))
            assert ids(await collector.next_groups(9)) == [f"s{n}" for n in range(9)]
        assert scores.most == 2 and runs.most == 2

    asyncio.run(main())


def test_an_error_in_scoring_comes_out_and_cancels_the_rest():
    async def main():
        runs = Runs()
        runs.open("s0")

        async def score(group):
            raise ZeroDivisionError(group.sample.id)

        with pytest.raises(ZeroDivisionError, match="s0"):
            async with Collector(samples(3), runs, running=2, ahead=3, score=score) as collector:
                await collector.next_groups(1)
        assert runs.running == 0 and "s1" in runs.cancelled

    asyncio.run(main())


def test_more_groups_than_may_be_ahead_can_be_asked_for_at_once():
    async def main():
        runs = Runs()
        runs.open(*(f"s{n}" for n in range(5)))
        async with Collector(samples(5), runs, running=1, ahead=1) as collector:
            assert ids(await collector.next_groups(4)) == ["s0", "s1", "s2", "s3"]

    asyncio.run(main())


def test_an_error_comes_out_although_an_older_group_still_runs():
    async def main():
        runs = Runs()
        chosen = [Sample(name, (), "t") for name in ("s0", "bad1", "s2", "s3")]
        with pytest.raises(ZeroDivisionError, match="bad1"):
            async with Collector(chosen, runs, running=3, ahead=4) as collector:
                runs.open("bad1")
                await settle()
                runs.open("s2")
                await settle()
                await collector.next_groups(1)
        assert runs.running == 0
        assert runs.cancelled == ["s0"]
        assert "s3" not in runs.started, "nothing new is started after an error"

    asyncio.run(main())


def test_finished_groups_are_handed_out_before_an_error_behind_them():
    async def main():
        runs = Runs()
        chosen = [Sample(name, (), "t") for name in ("s0", "s1", "bad2")]
        async with Collector(chosen, runs, running=3, ahead=3) as collector:
            runs.open("bad2", "s0", "s1")
            await settle()
            assert ids(await collector.next_groups(1)) == ["s0"]
            assert ids(await collector.next_groups(1)) == ["s1"]
            for _ in range(2):
                with pytest.raises(ZeroDivisionError, match="bad2"):
                    await collector.next_groups(1)

    asyncio.run(main())


def test_an_error_of_the_samples_comes_out_after_what_was_started():
    def broken():
        yield from samples(2)
        raise OSError("disk gone")

    async def main():
        runs = Runs()
        runs.open("s0", "s1")
        async with Collector(broken(), runs, running=1, ahead=5) as collector:
            assert ids(await collector.next_groups(2)) == ["s0", "s1"]
            with pytest.raises(OSError, match="disk gone"):
                await collector.next_groups(1)

    asyncio.run(main())


def test_nothing_runs_after_close():
    async def main():
        runs = Runs()
        async with Collector(samples(10), runs, running=4, ahead=10) as collector:
            await settle()
            runs.open("s0")
            assert ids(await collector.next_groups(1)) == ["s0"]
            await settle()
        assert runs.running == 0
        assert sorted(runs.cancelled) == ["s1", "s2", "s3", "s4"]
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await settle()
        assert len(runs.started) == 5

    asyncio.run(main())


def test_closing_waits_for_clean_up_even_when_it_is_cancelled_itself():
    async def main():
        runs = Runs()

        async def use():
            async with Collector(samples(3), runs, running=3, ahead=3) as collector:
                await collector.next_groups(1)

        task = asyncio.ensure_future(use())
        await settle()
        for _ in range(5):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert runs.running == 0 and len(runs.cancelled) == 3

    asyncio.run(main())


def test_a_cancelled_wait_loses_no_group():
    async def main():
        runs = Runs()
        async with Collector(samples(3), runs, running=1, ahead=1) as collector:
            runs.open("s0")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(collector.next_groups(2), 0.01)
            assert runs.cancelled == []
            runs.open("s1", "s2")
            assert ids(await collector.next_groups(3)) == ["s0", "s1", "s2"]

    asyncio.run(main())


def test_a_group_cancelled_from_elsewhere_is_an_error_not_a_silence():
    async def cancels(sample):
        raise asyncio.CancelledError

    async def main():
        async with Collector(samples(1), cancels, running=1, ahead=1) as collector:
            with pytest.raises(RuntimeError, match="cancelled from elsewhere"):
                await collector.next_groups(1)

    asyncio.run(main())


def test_groups_that_were_handed_out_are_let_go():
    class Seen(Group):
        pass

    async def run(sample):
        return Seen(sample, [])

    async def main():
        alive = []
        async with Collector(samples(30), run, running=2, ahead=3) as collector:
            while groups := await collector.next_groups(2):
                alive += [weakref.ref(group) for group in groups]
                del groups
            gc.collect()
            assert len(alive) == 30
            assert [ref for ref in alive if ref() is not None] == []

    asyncio.run(main())


@pytest.mark.parametrize("count", [1, 2, 30])
def test_groups_that_finish_at_once_do_not_end_the_run_early(count):
    async def run(sample):
        return Group(sample, [])

    async def main():
        seen = []
        async with Collector(samples(30), run, running=1, ahead=1) as collector:
            while groups := await collector.next_groups(count):
                seen += ids(groups)
        assert seen == [f"s{n}" for n in range(30)]

    asyncio.run(main())


def test_no_samples_is_no_groups():
    async def main():
        async with Collector([], Runs(), running=1, ahead=1) as collector:
            assert await collector.next_groups(3) == []

    asyncio.run(main())


@pytest.mark.parametrize("bounds", [{"running": 0, "ahead": 1}, {"running": 1, "ahead": 0}])
def test_bounds_below_one_are_refused(bounds):
    with pytest.raises(ValueError, match="at least 1"):
        Collector([], Runs(), **bounds)
