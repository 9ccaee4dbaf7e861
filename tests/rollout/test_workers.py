"""Episode workers: the same tokens for any number of them, and nothing lost when one ends or stands still."""

import asyncio
import io
import json
import os
import pickle
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest

import turnwise as tw
from turnwise.config import Config
from turnwise.engines.rendering import make_renderer
from turnwise.errors import ConfigError, EngineError, EpisodeError, TurnwiseError
from turnwise.ledger import Media, MediaSpan
from turnwise.rollout.workers import hosts, players
from turnwise.rollout.workers import pool as pools
from turnwise.rollout.workers.images import IncomingImages, OutgoingImages
from turnwise.rollout.workers.link import sendable
from turnwise.rollout.workers.messages import Play, Ready
from turnwise.rollout.workers.pool import WorkerPool
from turnwise.storage import underway
from turnwise.system import children, resources, time_budget
from turnwise.system.metrics import Metric
from turnwise.types import Trajectory

ENGINE = '''
"""An engine whose turns lie ready: three calls of the calculator, then an answer."""
import asyncio
from collections import Counter

from turnwise.engines.samplers.sampler import Capabilities, Logprobs
from turnwise.errors import EngineError
from turnwise.types import Completion, FinishReason

CALL = '<tool_call>\\n{"name": "calculate", "arguments": {"expression": "%d + 17"}}\\n</tool_call>'


class Ready:
    capabilities = Capabilities(Logprobs.SCALED, frozenset())
    context_length = 4096

    def __init__(self, config, source, tokenizer):
        texts = [*(CALL % number for number in range(3)), "#### 42"]
        self.turns = [tokenizer.encode(text + "<|im_end|>").ids for text in texts]
        self.spoken = Counter()

    async def generate(self, request):
        await asyncio.sleep(0.001)
        number = self.spoken[request.conversation]
        self.spoken[request.conversation] += 1
        ids = self.turns[min(number, 3)]
        noise = request.noise.bits() % 1000 / 1000
        return Completion.of(ids, [-noise] * len(ids), FinishReason.STOP, version=0)

    async def release(self, conversation):
        self.spoken.pop(conversation, None)

    async def close(self):
        pass

    async def publish(self, update, version):
        pass

    sleep = wake = close


class Failing(Ready):
    async def generate(self, request):
        if self.spoken[request.conversation] == 1:
            raise EngineError("the engine has had enough")
        return await super().generate(request)
'''

PARTS = '''
"""A tool, a user and a scorer that say which process they run in."""
import os

import turnwise as tw
from turnwise.errors import ConfigError


@tw.tool
async def calculate(expression: str) -> tw.ToolResult:
    """Evaluate an arithmetic expression."""
    return tw.ToolResult("42", info={"process": os.getpid()})


async def customer(turn):
    return None


async def reward(trajectory):
    return {"score": 1.0, "here": 0.0}


async def broken(trajectory):
    raise ConfigError("the reward needs a key")
'''


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "parts.py").write_text(PARTS)
    return tmp_path


def config(workers: int | None, *settings: str, samples: int = 6) -> Config:
    return tw.configure(
        "engine=engine.py:Ready",
        "rollout.tools=[parts.py:calculate]",
        "rollout.interaction=null",
        "eval.group_size=2",
        f"eval.samples={samples}",
        f"rollout.workers={'null' if workers is None else workers}",
        *settings,
    )


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The workers that were started; none of them is left afterwards."""
    started: list[int] = []
    start = children.start_interpreter

    def noted(module: str, channel: int) -> object:
        process = start(module, channel)
        if module == hosts.WORKER:
            started.append(process.pid)
        return process

    monkeypatch.setattr(children, "start_interpreter", noted)
    yield started
    for process in started:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def told(trajectory: Trajectory) -> tuple[object, ...]:
    """What must not depend on who played it."""
    tokens = [(s.token_ids.tolist(), s.logprobs.tolist(), s.origins.tolist()) for s in trajectory.segments]
    return trajectory.sample.id, trajectory.sibling, tokens, trajectory.reward, trajectory.stop_reason


def test_episodes_are_the_same_and_played_elsewhere(plugins: Path, processes: list[int]):
    here = tw.evaluate(config(0, "run=here"))
    there = tw.evaluate(config(2, "run=there"))
    assert [told(each) for each in there.trajectories] == [told(each) for each in here.trajectories]
    players = {call.info["process"] for each in there.trajectories for call in each.calls}
    assert players <= set(processes) and len(processes) == 2
    assert {call.info["process"] for each in here.trajectories for call in each.calls} == {os.getpid()}
    assert there.overall == here.overall


def test_a_script_is_opened_by_each_worker(plugins: Path, processes: list[int]):
    settings = ["engine=scripted", 'engine.script=["#### 1", "#### 2"]']
    here = tw.evaluate(config(0, "run=here", *settings))
    there = tw.evaluate(config(1, "run=there", *settings))
    assert [told(each) for each in there.trajectories] == [told(each) for each in here.trajectories]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.long), signal.SIGSTOP])
def test_a_worker_that_ends_or_stands_still_is_replaced(
    plugins: Path, processes: list[int], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
):
    monkeypatch.setattr(pools, "HANG_SECONDS", 8.0)
    here = tw.evaluate(config(0, "run=here", samples=12))
    give, struck = WorkerPool._give, []

    def strike(self: WorkerPool, play: pools.PlayUnderWay) -> None:
        give(self, play)
        if len(struck) < 1 and play.message.number == 5:
            host = self._workers[0].host
            assert isinstance(host, hosts.HostProcess)
            struck.append(host.process.pid)
            os.kill(struck[0], number)

    monkeypatch.setattr(WorkerPool, "_give", strike)
    there = tw.evaluate(config(2, "run=there", samples=12))
    assert struck and [told(each) for each in there.trajectories] == [told(each) for each in here.trajectories]
    assert len(processes) == 3
    assert "was lost" in (there.run / "log.txt").read_text()


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.long), 1])
def test_a_worker_that_cannot_be_replaced_leaves_the_run_to_the_others(
    plugins: Path, processes: list[int], monkeypatch: pytest.MonkeyPatch, workers: int
):
    start, give = WorkerPool._started, WorkerPool._give

    async def no_more(self: WorkerPool) -> object:
        if len(processes) >= workers:
            raise EngineError("no memory is left")
        return await start(self)

    def strike(self: WorkerPool, play: pools.PlayUnderWay) -> None:
        give(self, play)
        if play.message.number == 5 and not play.losses:
            os.kill(self._workers[0].host.process.pid, signal.SIGKILL)

    monkeypatch.setattr(WorkerPool, "_started", no_more)
    monkeypatch.setattr(WorkerPool, "_give", strike)
    if workers == 1:
        with pytest.raises(EngineError, match="no memory is left"):
            tw.evaluate(config(1, samples=12))
        return
    here, there = tw.evaluate(config(0, "run=here", samples=12)), tw.evaluate(config(2, "run=there", samples=12))
    assert [told(each) for each in there.trajectories] == [told(each) for each in here.trajectories]
    assert "1 of 2 are left: no memory is left" in (there.run / "log.txt").read_text()


def test_a_group_that_ends_every_worker_stops_the_run(
    plugins: Path, processes: list[int], monkeypatch: pytest.MonkeyPatch
):
    (plugins / "deadly.py").write_text(
        "import os\nimport turnwise as tw\n\n\n@tw.tool\nasync def calculate(expression: str) -> str:\n"
        '    """Evaluate."""\n    os._exit(7)\n'
    )
    monkeypatch.setattr("turnwise.reports.checks.run_checks.check_before_run", _unchecked)  # it would end this process
    with pytest.raises(TurnwiseError, match=r"sample .*: 3 episode workers ended with it \(exit status 7\)"):
        tw.evaluate(config(1, "rollout.tools=[deadly.py:calculate]", samples=1))


async def _unchecked(*_: object, **__: object) -> None:
    """Nothing is tried before the run."""


def test_what_an_engine_raises_stops_the_run_as_it_does_without_workers(plugins: Path, processes: list[int]):
    with pytest.raises(TurnwiseError, match="the engine has had enough"):
        tw.evaluate(config(1, "engine=engine.py:Failing"))


def test_what_a_scorer_raises_stops_the_run(plugins: Path, processes: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("turnwise.reports.checks.run_checks.check_before_run", _unchecked)
    with pytest.raises(ConfigError, match="the reward needs a key"):
        tw.evaluate(config(1, "scoring.scorers.default=parts.py:broken"))


def test_a_scorer_of_the_callers_scores_here(plugins: Path, processes: list[int]):
    scored: list[int] = []

    async def reward(trajectory: Trajectory) -> float:
        scored.append(os.getpid())
        return 0.5

    report = tw.evaluate(config(1), scorer=reward)
    assert {each.reward for each in report.trajectories} == {0.5}
    assert set(scored) == {os.getpid()}


def test_what_other_processes_cannot_have_is_played_here_where_nobody_asked_for_workers(
    plugins: Path, processes: list[int], monkeypatch: pytest.MonkeyPatch
):
    async def customer(turn: object) -> None:
        return None

    def chosen(config: Config) -> int:
        return 2 if config.rollout.workers is None else config.rollout.workers

    monkeypatch.setattr(players, "episode_workers", chosen)
    report = tw.evaluate(config(None, samples=1), interaction=customer)
    assert processes == [] and "none: interaction came as Python objects" in (report.run / "plan.txt").read_text()
    narrow = tw.evaluate(config(None, "rollout.tool_options={calculate: {concurrency: 1}}", samples=1))
    assert processes == [] and "the tool calculate takes 1 call(s) at once" in (narrow.run / "plan.txt").read_text()
    plan = (tw.evaluate(config(None, samples=1)).run / "plan.txt").read_text()
    assert len(processes) == 2 and "2 processes play the episodes (rollout.workers=null)" in plan


def test_objects_and_narrow_tools_are_refused_before_anything_starts(plugins: Path, processes: list[int]):
    async def customer(turn: object) -> None:
        return None

    with pytest.raises(ConfigError, match=r"interaction were given as Python objects.*rollout.workers=0"):
        tw.evaluate(config(2), interaction=customer)
    with pytest.raises(ConfigError, match=r"the tool calculate takes 1 call\(s\) at once"):
        tw.evaluate(config(2, "rollout.tool_options={calculate: {concurrency: 1}}"))
    with pytest.raises(ConfigError, match=r"each of rollout.workers runs sandboxes on its own node"):
        tw.evaluate(config(2, "cluster=ray", "ray.sandboxes=1"))
    assert processes == []


def test_a_training_that_loses_a_worker_has_the_numbers_of_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: list[int]
):
    monkeypatch.chdir(tmp_path)
    give, struck = WorkerPool._give, list[int]()

    def strike(self: WorkerPool, play: pools.PlayUnderWay) -> None:
        give(self, play)
        if play.message.split == "train" and play.message.step == 1 and not struck:  # in the middle of a step
            struck.append(next(each.host.process.pid for each in self._workers if play.message.number in each.plays))
            os.kill(struck[0], signal.SIGKILL)

    monkeypatch.setattr(WorkerPool, "_give", strike)
    settings = [
        "rollout.tools=[calculate]",
        "training.steps=2",
        "training.groups=2",
        "training.group_size=2",
        "rollout.max_assistant_turns=3",
        "training.max_lag=0",
        "eval.samples=2",
        "engine.threads=1",
    ]
    here, there = (
        tw.train(tw.configure(*settings, f"rollout.workers={workers}", f"run=w{workers}")) for workers in (0, 2)
    )
    policies = [(report.run / "policy" / "model.safetensors").read_bytes() for report in (here, there)]
    assert policies[0] == policies[1]
    assert len(processes) == 3 and struck
    lines = [json.loads(line) for line in (there.run / "metrics.jsonl").read_text().splitlines()]
    assert [line["rollout/workers_lost"] for line in lines if "rollout/workers_lost" in line] == [0.0, 1.0]


class Garbled:
    """A worker that begins, and then says what nobody can read."""

    name = "episode worker 1"

    def __init__(self) -> None:
        self.told = asyncio.Event()
        self.link = self
        self._words: list[object] = [Ready([])]

    def send(self, message: object) -> None:
        if isinstance(message, Play):
            self.told.set()

    async def receive(self) -> list[object]:
        if self._words:
            return [self._words.pop()]
        await self.told.wait()
        raise AttributeError("there is no such message here")

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        pass

    kill = close

    async def ended(self) -> str:
        return "it was ended"

    reaped = ended


class GarbledHosts(hosts.HostsHere):
    """Where all workers are like that."""

    async def make(self) -> Any:
        return Garbled()


def test_a_group_of_which_a_word_could_not_be_read_is_not_waited_for():
    async def main() -> None:
        setup: Any = SimpleNamespace(workers=1)
        said: list[str] = []
        pool = WorkerPool(setup, GarbledHosts(None), said.append)
        await pool.start()
        sample: Any = SimpleNamespace(id="s")
        drawn: Any = SimpleNamespace(split="test", sampling=None, scored=True)
        with pytest.raises(AttributeError, match="no such message here"):
            await asyncio.wait_for(pool.play(sample, None, [0], 0, drawn), 60)
        while pool.take_lost() == 0:
            await asyncio.sleep(0)
        await pool.close()
        assert "episode worker 1 was lost" in said[0]

    asyncio.run(main())


# --- parts -----------------------------------------------------------------------------------------------------


class Odd(Exception):
    """An exception that cannot be made again from its arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def test_an_error_crosses_as_what_it_is_or_as_its_words():
    known = sendable(EpisodeError("the node left"))
    assert isinstance(known, EpisodeError) and str(known) == "the node left"
    assert "raised in an episode worker" in known.__notes__[0]
    odd = sendable(Odd("this", "that"))
    assert type(odd) is RuntimeError and str(odd) == "Odd: this and that"


def test_limits_of_a_run_are_divided_among_its_processes(monkeypatch: pytest.MonkeyPatch):
    whole = resources.free_memory()
    monkeypatch.setattr(resources, "_processes", 4)
    assert [resources.part_of(limit) for limit in (64, 6, 3, 1)] == [16, 1, 1, 1]
    assert resources.free_memory() < whole / 2


def test_waits_of_a_turn_are_measured_for_another_process():
    async def wait() -> tuple[float, float]:
        with time_budget.measured() as waited:
            task = asyncio.create_task(slot())
        await task
        return waited(), started

    started = 0.05

    async def slot() -> None:
        with time_budget.waiting():
            await asyncio.sleep(started)

    waited, least = asyncio.run(wait())
    assert waited >= least * 0.9


def test_what_other_processes_play_is_shown_with_what_is_played_here():
    def part(playing: int, started: float) -> dict[str, object]:
        episodes = [{"sample_id": f"s{started}", "started": started}] * playing
        return {"playing": playing, "finished": 0, "episodes": episodes}

    joined = underway.joined([part(1, 3.0), part(2, 1.0)])
    assert joined["playing"] == 3
    assert [episode["started"] for episode in joined["episodes"]] == [1.0, 1.0, 3.0]


def test_counts_of_other_processes_are_taken_with_ours():
    from turnwise.scoring.event_loop_resources import report_counts, take_counts

    async def counted() -> tuple[list[Metric], list[Metric]]:
        report_counts([Metric("judge/requests", 3)])
        return take_counts(), take_counts()

    first, second = asyncio.run(counted())
    assert [metric.value for metric in first] == [3] and second == []


def plain_png(shade: int) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (64, 64), (shade, shade, 0)).save(file, "PNG")
    return file.getvalue()


def shown_image(digest: str) -> Media:
    ids = np.full(4, 7)
    pixels = np.random.default_rng(len(digest)).random((64, 192), np.float32)
    return Media(digest, b"file of " + digest.encode(), ids, ids == 7, {"pixel_values": pixels})


def test_an_image_crosses_once_and_is_forgotten_with_its_last_holder():
    sent, received = OutgoingImages(), IncomingImages(None)

    def across(*messages: object) -> tuple[list[Any], int]:
        content = sent.packed(list(messages))
        return received.unpacked(content), len(content)

    first, second = shown_image("a"), shown_image("bb")
    (one, two, again), size = across(first, second, MediaSpan(first, 3))
    assert again.media is one and size > one.arrays["pixel_values"].nbytes + two.arrays["pixel_values"].nbytes
    assert (one.digest, one.content, one.features) == ("a", first.content, 4)
    np.testing.assert_array_equal(one.arrays["pixel_values"], first.arrays["pixel_values"])
    turn, size = across(MediaSpan(first, 2), MediaSpan(second, 20))
    assert [span.media for span in turn] == [one, two] and size < 1000
    held = weakref.ref(two)
    del second, two, turn
    assert held() is not None, "they may speak of it again: nobody has said otherwise"
    across("anything")
    assert held() is None
    (newer,), size = across(shown_image("bb"))
    assert newer.digest == "bb" and size > newer.arrays["pixel_values"].nbytes


def test_a_run_keeps_the_images_of_its_workers_in_bounds(monkeypatch: pytest.MonkeyPatch):
    config = tw.configure("task=tinylook", "model.path=tiny_vision")
    there, here = make_renderer(config).images, make_renderer(config).images
    assert there is not None and here is not None
    monkeypatch.setattr("turnwise.chat.images.processor.KEPT_BYTES", 1)  # the arrays of one image
    sent, received = OutgoingImages(), IncomingImages(here.adopt)
    pictures = [plain_png(number) for number in range(2)]
    prepared = [there.prepare(picture) for picture in pictures]
    monkeypatch.setattr(here, "_process", None)
    adopted = received.unpacked(sent.packed([*prepared]))
    np.testing.assert_array_equal(adopted[1].arrays["pixel_values"], prepared[1].arrays["pixel_values"])
    assert here.prepare(pictures[1]) is adopted[1], "nothing is prepared twice"
    monkeypatch.undo()
    np.testing.assert_array_equal(adopted[0].arrays["pixel_values"], prepared[0].arrays["pixel_values"])
    with pytest.raises(ValueError, match="was sent over a link"):
        file = io.BytesIO(sent.packed([prepared[0]]))
        assert pickle.load(file) == []
        pickle.load(file)
