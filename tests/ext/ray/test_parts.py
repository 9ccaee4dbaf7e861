"""What needs no cluster: what is refused, what an address in a run is worth, and how turns and weights travel."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from turnwise import configure
from turnwise.config.sections import section
from turnwise.data.task_config import compose
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.engines.samplers.sampler import Capabilities, Logprobs
from turnwise.engines.weight_updates import FullWeights
from turnwise.errors import ConfigError, EngineError, EngineLost, WeightsSuperseded
from turnwise.ext.fsdp.rank import Rank
from turnwise.ext.ray import weight_store
from turnwise.ext.ray.config import RayConfig
from turnwise.ext.ray.connection import Connection
from turnwise.ext.ray.learner import LearnerWeights
from turnwise.ext.ray.learner_actor import LearnerActor, StaleWeights
from turnwise.ext.ray.messages import PackedOutcomes, PackedRequests, TurnOutcome
from turnwise.ext.ray.placement import RayPlacement
from turnwise.ext.ray.ranks import OWN, ActorRanks, Home, RankActor
from turnwise.ext.ray.resource_needs import Room, demands, in_words, lay_out
from turnwise.ext.ray.sampler_actor import SamplerFacts, fetched
from turnwise.ext.ray.samplers import ActorSampler, open_samplers
from turnwise.ext.ray.sandboxes import ClusterPool
from turnwise.ext.ray.weight_store import WeightsPlan, pack, unpack
from turnwise.ext.ray.workers import Workers
from turnwise.ext.sandbox.config import SandboxConfig
from turnwise.ext.sandbox.results import ExecutionStatus, Result
from turnwise.ext.sandbox.zygote_process import SandboxLost
from turnwise.reports.preflight import preflight
from turnwise.training.checks import check_training
from turnwise.training.runs.trust import reaches
from turnwise.types import Completion, FinishReason, VersionRun

SERVER_LOGS = ("engine=vllm_server", "ray.address=auto")


@pytest.mark.parametrize(
    "settings",
    [
        ["ray.sampler_gpus=1"],
        ["ray.sampler_gpus=0.5"],
        ["servers.options=[-tp, '2', -dp, '4']", "ray.sampler_gpus=8"],
        ["servers.replicas=3", "ray.sampler_gpus=3"],
        [],
    ],
)
def test_a_sampler_that_reserves_what_its_servers_take_is_let_through(settings: list[str]) -> None:
    RayPlacement(configure("cluster=ray", *SERVER_LOGS, *settings)).check()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["ray.address=ray://there:10001"], "HOST:PORT"),
        (["ray.address=there"], "HOST:PORT"),
        (["ray.address='there:70000'"], "HOST:PORT"),
        (["engine=vllm_server", "servers.addresses=['http://127.0.0.1:1']"], "samplers of a cluster start their own"),
        (["engine=scripted", "engine.script=[yes]", "ray.samplers=2"], "engine=scripted is not on the cluster"),
        ([*SERVER_LOGS, "servers.options=[-tp, '2', -dp, '4']", "ray.sampler_gpus=2"], "take 8 GPU.*set it to 8"),
        ([*SERVER_LOGS, "servers.options=['--data-parallel-size=8']"], "sampler_gpus=0: .*set it to 8"),
        ([*SERVER_LOGS, "ray.sampler_gpus=2"], r"take 1 GPU\(s\).*set it to 1"),
        ([*SERVER_LOGS, "servers.replicas=3", "ray.sampler_gpus=2"], "servers.replicas=3 x .*set it to 3"),
        (["ray.scorers=1", "scoring.run=http", "scoring.url=http://127.0.0.1:1"], "a server scores already"),
        (["ray.sandboxes=1", "sandbox.url=http://127.0.0.1:1"], "a server runs the code already"),
    ],
)
def test_what_a_cluster_cannot_do_is_refused_at_once(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RayPlacement(configure("cluster=ray", *settings)).check()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["learner.device=cuda", "learner.processes=4", "ray.learner_gpus=2"], "learner.processes=4.*set it to 1"),
        (["learner.device=cuda"], "no CUDA device"),
    ],
)
def test_a_learner_that_its_node_has_no_room_for_is_refused_before_it_is_placed(
    settings: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_training(configure("cluster=ray", "ray.address=auto", *settings))
    several = ["cluster=ray", "learner.device=cuda", "learner.processes=2", "ray.learner_gpus=1"]
    check_training(configure(*several, "ray.address=auto"))
    with pytest.raises(
        ConfigError, match=r"has 0 GPUs, and the run asks for 5: learner 2 x \(1 CPUs, 1 GPUs\) \+ samplers 3 x "
    ):
        check_training(configure(*several, "ray.samplers=3", "ray.sampler_gpus=1"))


def test_check_names_all_that_asks_for_gpus_here() -> None:
    eight = ["ray.samplers=8", "ray.sampler_gpus=1", "learner.processes=8", "ray.learner_gpus=1"]
    report = preflight(compose(["cluster=ray", "engine=vllm_server", "learner.device=cuda", *eight]))
    (error,) = report.errors
    assert "the run asks for 16: learner 8 x (1 CPUs, 1 GPUs) + samplers 8 x (1 CPUs, 1 GPUs) = " in error.text


class Blind(ActorRanks):
    """Two ranks of which one has another disk."""

    def __init__(self, *nodes: str) -> None:
        super().__init__(None, ("cpu", "cpu"), RayConfig(), 1.0)
        self.homes = [Home(node, number) for number, node in enumerate(nodes)]

    def call(self, method: str, arguments: Any) -> list[Any]:
        assert method == "has_file" and len(arguments) == 2
        return [True, False]


def test_ranks_on_several_nodes_must_all_see_the_run() -> None:
    with pytest.raises(ConfigError, match=r"rank 1 on b does not see runs/first; .*put runs_dir on a disk that all"):
        Blind("a", "b").sees("runs/first/mark")
    assert Blind("a", "a").sees("runs/first/mark") is False, "what they write is sent"


def test_what_an_actor_answers_itself_is_no_method_of_the_rank() -> None:
    assert [name for name in OWN if hasattr(Rank, name) or not hasattr(RankActor, name)] == []


def test_lay_out_packs_ranks_and_spreads_the_others() -> None:
    config = configure("cluster=ray", "learner.processes=3", "ray.learner_cpus=2", "ray.samplers=4")
    rooms = [Room("a", 2, 0), Room("b", 5, 0), Room("c", 2, 0)]
    found = lay_out(rooms, demands(config, training=True))
    assert found.nodes == ["a: learner 1", "b: learner 2, samplers 1", "c: samplers 2"]
    assert found.short == (
        "1 of 4 samplers; the run asks for learner 3 x (2 CPUs, 0 GPUs) + samplers 4 x (1 CPUs, 0 GPUs) = 10 CPUs, 0 GPUs, "
        "and the cluster has 3 node(s), 9 CPUs, 0 GPUs"
    )
    assert in_words(demands(config, training=False)) == "samplers 4 x (1 CPUs, 0 GPUs) = 4 CPUs, 0 GPUs"


class Call:
    """A method of an actor, as Ray offers it."""

    def __init__(self, work: Callable[..., Awaitable[Any]]) -> None:
        self.remote = lambda *args: asyncio.ensure_future(work(*args))

    def options(self, **_: Any) -> "Call":
        return self


async def _nothing() -> None:
    pass


class Actor:
    """In this process, in place of a SamplerActor on a node."""

    def __init__(self) -> None:
        self.room, self.results, self.closed = asyncio.Event(), asyncio.Queue[Any](), False
        self.room.set()
        self.ping, self.open, self.submit, self.collect, self.close = map(
            Call, (self._ping, self._open, self._submit, self._collect, self._close)
        )
        self.wake, self.beat = Call(self._ping), Call(_nothing)

    async def _ping(self) -> None:
        await self.room.wait()

    async def _open(self) -> SamplerFacts:
        takes = Capabilities(Logprobs.SCALED, frozenset({FullWeights}))
        return SamplerFacts(32, takes, 1, None, "", "float32", (), "a node")

    async def _submit(self, *_: Any) -> None:
        pass

    async def _collect(self, *_: Any) -> Any:
        found = await self.results.get()
        if isinstance(found, Exception):
            raise found
        return found

    async def _close(self) -> None:
        self.closed = True


def sampler_of(made: list[Actor], said: list[str], *overrides: str) -> ActorSampler:
    exceptions = import_module("ray").exceptions
    ray = SimpleNamespace(exceptions=exceptions, kill=lambda actor: None, nodes=lambda: [])
    connection = Connection(section(configure("cluster=ray", *overrides), RayConfig), ray, listeners=[said.append])
    actors = iter(made)
    return ActorSampler(connection, lambda: next(actors), 1)


def turn(sampler: ActorSampler) -> "asyncio.Task[Completion]":
    asked = Request("c", np.array([1, 2]), SamplingParams(max_tokens=4), NoiseKey(0, 0, "s", 0))
    return asyncio.create_task(sampler.generate(asked))


def test_turns_of_a_sampler_that_is_made_anew_are_lost_and_those_of_a_closed_one_fail() -> None:
    async def main() -> None:
        actors = [Actor(), Actor()]
        sampler = sampler_of(actors, [])
        await sampler.start()
        waiting = turn(sampler)
        await asyncio.sleep(0.01)
        await sampler.restart()
        with pytest.raises(EngineLost, match="is restarted"):
            await waiting
        waiting = turn(sampler)
        await asyncio.sleep(0.01)
        await sampler.close()
        await sampler.close()
        with pytest.raises(EngineError, match="is closed") as caught:
            await waiting
        assert not isinstance(caught.value, EngineLost)
        with pytest.raises(EngineLost, match="is not there"):
            await sampler.wake()
        assert [one.closed for one in actors] == [False, True]  # which removes its files before it is killed

    asyncio.run(main())


def test_what_breaks_the_handing_out_of_results_is_heard_by_who_waits() -> None:
    async def main() -> None:
        actor = Actor()
        sampler = sampler_of([actor], [])
        await sampler.start()
        waiting = turn(sampler)
        await asyncio.sleep(0.01)
        actor.results.put_nowait(ValueError("a bug"))
        with pytest.raises(ValueError, match="a bug"):
            await waiting
        assert not await sampler.healthy()
        await sampler.close()

    asyncio.run(main())


def test_a_sampler_that_waits_for_room_says_so() -> None:
    async def main() -> None:
        actor, said = Actor(), list[str]()
        actor.room.clear()
        sampler = sampler_of([actor], said, "ray.wait_seconds=0.01")
        starting = asyncio.create_task(sampler.start())
        async with asyncio.timeout(30):
            while not said:
                await asyncio.sleep(0.005)
        actor.room.set()
        await starting
        assert "waits for a node with room: the cluster has 0 node(s)" in said[0]
        await sampler.close()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_run_begins_with_the_samplers_that_are_there_and_names_the_others_until_they_come() -> None:
    async def main() -> None:
        actors, said = [Actor() for _ in range(4)], list[str]()
        loaded = asyncio.Event()

        def opens(work: Callable[[], Awaitable[SamplerFacts]], *, fails: Exception | None = None) -> Call:
            async def late() -> SamplerFacts:
                await loaded.wait()
                if fails is not None:
                    raise fails
                return await work()

            return Call(late)

        actors[1].open = opens(actors[1]._open)
        actors[2].open = opens(actors[2]._open, fails=ConfigError("no such folder on this node"))
        made = iter(actors)
        options = SimpleNamespace(remote=lambda *_: next(made))
        ray = SimpleNamespace(
            exceptions=import_module("ray").exceptions, kill=lambda actor: None, nodes=lambda: [],
            remote=lambda **_: lambda kind: SimpleNamespace(options=lambda **_: options),
        )  # fmt: skip
        config = configure("cluster=ray", "ray.samplers=3", "ray.wait_seconds=0.05")
        connection = Connection(section(config, RayConfig), ray, listeners=[said.append])
        async with open_samplers(connection, config, said.append) as (pool, facts):
            assert facts.context_length == 32 and len(pool.names) == 1
            assert any("1 of 3 sampler(s) are running" in text for text in said)
            await until(lambda: sum("still loads its model on" in text for text in said) >= 2)
            loaded.set()
            await until(lambda: len(pool.names) == 2 and any("given up" in text for text in said))
        assert any("sampler 2 on a node joined" in text for text in said)
        assert any("sampler 3 is given up: no such folder on this node" in text for text in said)

    asyncio.run(main())


def test_one_that_was_lost_while_it_started_is_no_reason_to_give_up_on_the_others() -> None:
    async def main() -> None:
        connection = Connection(section(configure("cluster=ray"), RayConfig), None)

        async def ends(seconds: float, found: int | EngineLost) -> int:
            await asyncio.sleep(seconds)
            if isinstance(found, EngineLost):
                raise found
            return found

        lost = EngineLost("its node left")
        tasks = [asyncio.create_task(ends(*one)) for one in ((0.0, lost), (0.05, 7))]
        assert await connection.first(tasks, lambda: True, "a sampler") == 7
        with pytest.raises(EngineLost, match="its node left"):
            await connection.first([asyncio.create_task(ends(0.0, lost))], lambda: True, "a sampler")

    asyncio.run(main())


def test_weights_that_newer_ones_replace_are_no_reason_to_restart_a_sampler() -> None:
    class Superseded(LearnerWeights):
        """Weights of a learner that has gone on since."""

        def __init__(self) -> None:
            pass

        async def parts(self) -> list[Any]:
            raise EngineLost("newer weights are on their way") from StaleWeights("the learner has made 2 updates")

    async def main() -> None:
        sampler = sampler_of([Actor()], [])
        await sampler.start()
        with pytest.raises(WeightsSuperseded, match="newer weights"):
            await sampler.publish(Superseded(), 1)
        assert await sampler.healthy()
        await sampler.close()

    asyncio.run(main())


class Opening:
    """An actor that opens after so many tries of all of its kind, each of which fails in this way."""

    def __init__(self, left: list[Exception]) -> None:
        self.open, self.beat = Call(self._open), Call(_nothing)
        self._left = left

    async def _open(self) -> None:
        if self._left:
            raise self._left.pop()


@pytest.mark.parametrize("error", [SandboxLost("the proof broke off"), EngineLost("its node left"), KeyError("a bug")])
def test_an_actor_that_takes_the_place_of_another_and_fails_keeps_nobody_waiting(error: Exception) -> None:
    async def main() -> None:
        left: list[Exception] = []
        killed: list[Any] = []
        ray = SimpleNamespace(exceptions=import_module("ray").exceptions, kill=killed.append)
        workers = Workers(
            Connection(section(configure("cluster=ray"), RayConfig), ray), "sandbox", lambda: Opening(left), 1
        )
        await workers.start()
        worker = await workers.take()
        left.append(error)
        with pytest.raises(EngineLost, match="it died"):
            async with workers.working(worker):
                raise EngineLost("it died")
        async with asyncio.timeout(30):
            if isinstance(error, KeyError):
                with pytest.raises(KeyError):
                    await workers.take()
            else:
                assert (await workers.take()).actor is not None and len(killed) == 2
        await workers.stop()

    asyncio.run(main())


def test_a_cancelled_call_of_a_sandbox_leaves_nothing_for_the_next_one() -> None:
    asked, ended = list[int](), list[int]()

    class Sandbox:
        """An actor whose first call takes for ever."""

        def __init__(self) -> None:
            self.open, self.run, self.end = Call(self._open), Call(self._run), Call(self._end)
            self.beat = Call(_nothing)

        async def _open(self) -> None:
            pass

        async def _run(self, number: int, *_: Any) -> Result:
            asked.append(number)
            if len(asked) == 1:
                await asyncio.Event().wait()
            return Result(ExecutionStatus.OK)

        async def _end(self, number: int) -> None:
            ended.append(number)

    async def main() -> None:
        ray = SimpleNamespace(exceptions=import_module("ray").exceptions, kill=lambda actor: None)
        config = configure("cluster=ray", "ray.sandboxes=1")
        workers = Workers(Connection(section(config, RayConfig), ray), "sandbox", Sandbox, 1)
        await workers.start()
        pool = ClusterPool(section(config, RayConfig), section(config, SandboxConfig), 1000)
        pool._workers = workers
        session = pool.session()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await session.run("x = 1")
        await session.run("x")
        await session.close()
        assert len(set(asked)) == 2 and ended == asked
        await workers.stop()

    asyncio.run(main())


def test_without_ray_there_is_one_clear_line(tmp_path: Path) -> None:
    code = "import sys; sys.modules['ray'] = None; from turnwise.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "eval", "cluster=ray", "eval.samples=1"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 2 and "pip install 'turnwise[ray]'" in found.stderr
    assert "Traceback" not in found.stderr and list(tmp_path.iterdir()) == []


def test_importing_turnwise_imports_no_ray() -> None:
    code = "import sys, turnwise.train, turnwise.ext.ray.placement; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_address_in_a_run_needs_trust(tmp_path: Path) -> None:
    config = configure("cluster=ray", "ray.address=there:6379")
    assert "ray.address=there:6379" in reaches(config, tmp_path)
    assert not [one for one in reaches(configure("cluster=ray"), tmp_path) if "cluster" in one]


def test_requests_and_results_arrive_as_they_were_sent() -> None:
    params, noise = SamplingParams(5, stop_strings=("x",)), NoiseKey(0, 1, "sample", 2)
    sent = [(n, Request(f"talk {n}", np.arange(n, dtype=np.int64), params, noise)) for n in (3, 0, 7)]
    for (number, one), (there, other, _) in zip(sent, PackedRequests.of(sent).requests(), strict=True):
        assert (number, one.conversation, one.params, one.noise) == (there, other.conversation, params, noise)
        assert other.token_ids.dtype == np.int64 and np.array_equal(one.token_ids, other.token_ids)
    runs = (VersionRun(1, 2), VersionRun(2, 1))
    good = Completion(np.array([4, 5, 6]), np.array([-1, -2, -3], np.float32), FinishReason.STOP, runs)
    empty = Completion.of([], [], FinishReason.LENGTH, version=3)
    outcomes = PackedOutcomes.of(
        [TurnOutcome(1, good), TurnOutcome(2, problem="gone", lost=True), TurnOutcome(3, empty)]
    ).outcomes()
    found = {one.number: one for one in outcomes}
    assert found[2] == TurnOutcome(2, problem="gone", lost=True) and len(found) == 3
    there = found[1].completion
    assert there is not None and there.versions == runs and there.finish_reason is FinishReason.STOP
    assert np.array_equal(there.token_ids, good.token_ids) and np.array_equal(there.logprobs, good.logprobs)
    there.logprobs[0] = 0.0  # it is the receiver's own
    assert PackedRequests.of([]).requests() == [] and PackedOutcomes.of([]).outcomes() == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_arrive_as_they_were_put(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_store, "PART_BYTES", 100)
    tensors = {f"layer.{n}": torch.randn(n + 1, 7) for n in range(6)} | {"bias": torch.randn(())}
    plan = WeightsPlan.of({name: tuple(tensor.shape) for name, tensor in tensors.items()}, dtype)
    parts = list(pack(plan, reversed(tensors.items())))
    assert len(parts) == len(plan.parts) > 2
    for owner in range(2):
        own = {name for names in plan.parts[owner::2] for name in names}
        shown = {name: tensor if name in own else tensor.to("meta") for name, tensor in tensors.items()}
        mine = list(pack(plan, reversed(shown.items()), owner=owner, owners=2))  # what lies on meta cannot be copied
        assert [part is not None and part.keys() for part in mine] == [
            number % 2 == owner and part.keys() for number, part in enumerate(parts) if part is not None
        ]
    update = unpack(plan.shapes, parts)
    found = dict(update.tensors)
    assert update.shapes == plan.shapes and found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name].to(getattr(torch, dtype))) for name in tensors)


def test_nodes_begin_with_different_parts_and_give_all_in_order() -> None:
    orders = []
    for node in (0, 5):
        asked: list[int] = []

        async def part(number: int, asked: list[int] = asked) -> object:
            asked.append(number)
            later: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
            later.set_result({"it": number})
            return {"it": number} if number % 2 else later  # of a learner alone, or where a rank has put it

        async def all_of_them(node: int = node) -> list[Any]:
            return await fetched([part(number) for number in range(4)], node)

        assert asyncio.run(all_of_them()) == [{"it": number} for number in range(4)]
        orders.append(asked)
    assert orders == [[0, 1, 2, 3], [1, 2, 3, 0]]


class Saving:
    """What an actor needs of a learner to send and receive its files."""

    step, token_budget = 3, 64

    def save_policy(self, folder: Path) -> None:
        assert not list(folder.iterdir())
        (folder / "policy").mkdir()
        (folder / "policy" / "weights").write_bytes(b"abc")

    def load(self, folder: Path) -> None:
        self.found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.glob("*/*")}
        assert [path.name for path in folder.iterdir()] == ["policy"]


KILLED = """
import os, signal
from types import SimpleNamespace
from turnwise.ext.ray.learner_actor import LearnerActor
LearnerActor(SimpleNamespace(path=SimpleNamespace(enter=lambda: None))).receive("policy/weights", b"abc")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_files_of_a_learner_travel_without_a_lock_and_those_of_a_killed_one_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed = subprocess.run([sys.executable, "-c", KILLED], cwd=Path(__file__).parents[3], check=False)
    assert killed.returncode < 0 and len(list(tmp_path.glob("*/files/policy/weights"))) == 1
    actor, learner = LearnerActor(SimpleNamespace(path=SimpleNamespace(enter=lambda: None))), Saving()
    actor._opened = learner
    sent = list(actor.saved(policy=True))
    assert sent == [("policy/weights", b"abc")] and not list(tmp_path.iterdir())
    actor.receive(*sent[0])
    actor.load_received()
    assert learner.found == dict(sent) and not list(tmp_path.iterdir())
