"""Actors that stand still, what counts as one loss, what Ray says of itself, and on what it listens; no cluster of nodes."""

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turnwise import configure
from turnwise.config.sections import section
from turnwise.errors import EngineError, EngineLost
from turnwise.ext.ray import learner as learner_module
from turnwise.ext.ray import workers as workers_module
from turnwise.ext.ray.config import RayConfig
from turnwise.ext.ray.connection import Connection
from turnwise.ext.ray.learner import MOST_LOSSES, MOST_TRIES, ActorLearner
from turnwise.ext.ray.learner_actor import LearnerFacts, LearnerReply
from turnwise.ext.ray.ray_log import FILE, RayLog
from turnwise.ext.ray.watchdog import Watchdog
from turnwise.ext.ray.weight_store import WeightsPlan
from turnwise.ext.ray.workers import MOST_LOSSES as MOST_OF_A_PLACE
from turnwise.ext.ray.workers import Workers

FACTS = LearnerFacts(WeightsPlan({}, ((),), "float32"), "cpu", False, "a node", "a machine")


def errors() -> Any:
    """Not before it is needed: Ray reads its environment when it is imported."""
    return import_module("ray").exceptions


class Method:
    """Of an actor, as Ray offers it: what it gives is its reference."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.remote = work

    def options(self, **_: Any) -> "Method":
        return self


def test_who_is_silent_is_told_once_and_who_answers_or_is_gone_is_not() -> None:
    """A reference here is a function that is true when its answer is there."""
    told, asked = list[str](), list[str]()

    def actor(name: str, answers: Callable[[], bool], error: Exception | None = None) -> Any:
        def beat() -> Any:
            asked.append(name)
            return SimpleNamespace(ready=answers, error=error)

        return SimpleNamespace(beat=Method(beat))

    def get(ref: Any) -> None:
        if ref.error is not None:
            raise ref.error

    def wait(refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return [ref for ref in refs if ref.ready()], [ref for ref in refs if not ref.ready()]

    dog = Watchdog(SimpleNamespace(exceptions=errors(), wait=wait, get=get))
    well, still = actor("well", lambda: True), actor("still", lambda: False)
    gone = actor("gone", lambda: True, errors().ActorDiedError())
    left = actor("left", lambda: False)
    for one, name in ((well, "well"), (still, "still"), (gone, "gone"), (left, "left")):
        dog.watch(one, 1.0, lambda words, name=name: told.append(f"{name} {words}"))  # type: ignore[misc]
    dog.leave(left)
    until = time.monotonic() + 30
    while (not told or asked.count("well") < 3) and time.monotonic() < until:
        time.sleep(0.02)
    dog.stop()
    assert told == ["still has given no sign of life for 1 s"]
    assert asked.count("gone") == asked.count("still") == 1 and "left" not in asked
    assert dog._thread is not None and not dog._thread.is_alive()


class FakeLearner:
    """An actor that opens, or fails in this way when it is asked to."""

    def __init__(self, fails: Exception | None) -> None:
        self.beat, self.open = Method(lambda: None), Method(lambda: fails or LearnerReply(FACTS, 0, 64, ()))
        self.score = Method(lambda *_: errors().ActorUnavailableError("its node does not answer", b"0" * 16))


def learner_of(fails: list[Exception | None], said: list[str], waits: tuple[bool, ...] = ()) -> ActorLearner:
    def get(ref: Any) -> Any:
        if isinstance(ref, Exception):
            raise ref
        return ref

    late = iter(waits)

    def wait(refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return ([], refs) if next(late, False) else (refs, [])

    ray = SimpleNamespace(exceptions=errors(), kill=lambda actor: None, get=get, wait=wait, nodes=lambda: [])
    connection = Connection(section(configure("cluster=ray"), RayConfig), ray)
    made = ActorLearner(connection, lambda: FakeLearner(fails.pop(0)), said.append, 1800.0)
    made.start()
    return made


def test_all_that_follows_from_one_loss_of_the_learner_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes that went away together: Ray learns of it one by one, and each try to make it again meets that."""
    monkeypatch.setattr(learner_module, "PAUSE_SECONDS", 0.0)
    died = [errors().ActorDiedError() for _ in range(MOST_TRIES - 1)]
    said: list[str] = []
    learner = learner_of([None, *died, None], said)
    learner.revive(learner._actor, EngineLost("the learner was lost (ActorUnavailableError)"))
    assert learner.losses == 1 and "restored from the start" in said[-1], said
    learner.close()


def test_a_learner_that_waits_for_room_says_so() -> None:
    said: list[str] = []
    learner = learner_of([None], said, waits=(True, True))
    assert (
        said
        == ["the learner waits for a node with room: the cluster has 0 node(s), 0 CPUs, 0 GPUs, not all of it free"] * 2
    )
    learner.close()


def test_a_learner_that_cannot_be_made_again_or_is_lost_again_and_again_stops_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learner_module, "PAUSE_SECONDS", 0.0)
    learner = learner_of([None, *(errors().ActorDiedError() for _ in range(MOST_TRIES))], [])
    with pytest.raises(EngineError, match=f"could not be restored in {MOST_TRIES} tries: .*ActorDiedError"):
        learner.revive(learner._actor, EngineLost("the learner was lost"))
    learner = learner_of([None] * (MOST_LOSSES + 2), [])
    with pytest.raises(EngineError, match=f"the learner was lost {MOST_LOSSES + 1} times in a row"):
        learner.score(None, None)  # type: ignore[arg-type]
    assert learner.losses == MOST_LOSSES + 1


class FakeScorer:
    """An actor of a set that opens when it may."""

    def __init__(self, may: asyncio.Event) -> None:
        self._may = may
        self.beat, self.open = Method(lambda: asyncio.ensure_future(_nothing())), Method(self._open)

    def _open(self) -> "asyncio.Future[Any]":
        return asyncio.ensure_future(self._may.wait())


async def _nothing() -> None:
    pass


def scorers(may: asyncio.Event, said: list[str], count: int, *overrides: str) -> Workers:
    ray = SimpleNamespace(
        exceptions=errors(), kill=lambda actor: None, nodes=lambda: [], wait=lambda refs, timeout: ([], refs)
    )
    connection = Connection(section(configure("cluster=ray", *overrides), RayConfig), ray, listeners=[said.append])
    return Workers(connection, "scorer", lambda: FakeScorer(may), count)


def test_a_scorer_that_is_placed_and_slow_to_open_is_not_said_to_have_no_room() -> None:
    async def main() -> None:
        may, said = asyncio.Event(), list[str]()
        workers = scorers(may, said, 1, "ray.wait_seconds=0.05")
        starting = asyncio.create_task(workers.start())
        async with asyncio.timeout(30):
            while not said:
                await asyncio.sleep(0.01)
            may.set()
            await starting
        assert said[0] == "scorer 1 is placed and still opens"
        await workers.stop()

    asyncio.run(main())


def test_scorers_that_go_away_together_are_replaced_and_one_place_that_kills_all_stops_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers_module, "PAUSE_SECONDS", 0.0)

    async def main() -> None:
        may, said = asyncio.Event(), list[str]()
        may.set()
        workers = scorers(may, said, 16)
        await workers.start()
        async with asyncio.timeout(30):
            while any(worker.actor is None for worker in workers._workers):
                await asyncio.sleep(0.01)

            async def lose(worker: Any) -> None:
                with pytest.raises(EngineLost):
                    async with workers.working(worker):
                        await asyncio.sleep(0)
                        raise EngineLost("its node left")

            await asyncio.gather(*(lose(worker) for worker in workers._workers))
            assert (await workers.take()).actor is not None and workers._connection.lost == {"scorer": 16}
            one = workers._workers[0]
            for _ in range(MOST_OF_A_PLACE):
                while one.actor is None:
                    await asyncio.sleep(0.01)
                await lose(one)
            with pytest.raises(EngineError, match="actors were lost in a row"):
                await workers.take()
        await workers.stop()

    asyncio.run(main())


def test_what_ray_says_of_itself_is_in_a_file_and_what_actors_print_on_the_console_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker: Any = import_module("ray._private.worker")
    before, level = worker.print_worker_logs, logging.getLogger("ray").level

    def hears(lines: list[str], pid: Any, name: str | None = None, *, error: bool) -> None:
        data = {"lines": lines, "pid": pid, "actor_name": name, "is_err": error, "ip": "10.0.0.1"}
        worker.print_to_stdstream(data, ignore_prefix=False)

    with RayLog() as log:
        assert log.keep_in(None) == ""
        hears(["You have likely discovered a bug in Ray", "state dump"], "raylet", error=True)
        assert log.keep_in(tmp_path) == f"; what Ray says of itself is in {tmp_path / FILE}"
        hears(["A worker died"], "raylet", error=False)
        hears(["*** SIGTERM received ***"], 7, "ScorerActor", error=True)
        hears(["a print of a scorer"], 7, "ScorerActor", error=False)
        hears(["Autoscaler status"], "autoscaler", error=False)
        logging.getLogger("ray._private.worker").error("Unhandled error: StaleWeights")
    console = capsys.readouterr()
    assert console.out == "" and console.err == "(ScorerActor pid=7, 10.0.0.1) a print of a scorer\n"
    lines = (tmp_path / FILE).read_text().splitlines()
    assert [line.partition(") ")[2] for line in lines[:5]] == [
        "You have likely discovered a bug in Ray", "state dump", "A worker died", "*** SIGTERM received ***",
        "a print of a scorer",
    ]  # fmt: skip
    assert len(lines) == 6 and lines[5].endswith("Unhandled error: StaleWeights")
    assert worker.print_worker_logs is before and logging.getLogger("ray").level == level


LISTENING = """
import asyncio, os, sys
sys.path.insert(0, {tests!r})
from listening import below, elsewhere, listening
from turnwise.ext.ray.connection import cluster_connection
from turnwise.ext.ray.sandboxes import ClusterPool
from turnwise.ext.ray.config import RayConfig
from turnwise.ext.sandbox.config import SandboxConfig

async def main():
    cluster = RayConfig(sandboxes=1)
    async with cluster_connection(cluster, print), ClusterPool(cluster, SandboxConfig(preload=[]), 1000) as pool:
        await pool.session().run("1")
        every = [os.getpid(), *below([os.getpid()])]
        print("listen", len(listening(every)), "elsewhere", elsewhere(every))
        assert any("raylet" in who for who in listening(every)) and any("gcs" in who for who in listening(every))
        assert any("SandboxActor" in who for who in listening(every))

asyncio.run(main())
print("left", {env!r} in os.environ)
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="the kernel does not tell who listens")
def test_a_cluster_that_is_started_here_listens_on_loopback_alone(tmp_path: Path) -> None:
    code = LISTENING.format(tests=str(Path(__file__).parents[2]), env="RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", code], env=clean | {"HOME": str(tmp_path)}, capture_output=True,
                          text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "elsewhere {}" in done.stdout and "started here, on 127.0.0.1" in done.stdout and "left False" in done.stdout
