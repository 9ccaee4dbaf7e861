"""Runs on a real Ray cluster of three nodes: the numbers of one process, whatever is killed meanwhile."""

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from listening import below, elsewhere, listening
from rich.console import Console
from safetensors.torch import load_file

from turnwise import configure
from turnwise.config.sections import section
from turnwise.data.task_config import compose
from turnwise.errors import ConfigError
from turnwise.ext.ray.config import RayConfig
from turnwise.ext.ray.connection import cluster_connection
from turnwise.ext.ray.sandboxes import ClusterPool
from turnwise.ext.sandbox.config import SandboxConfig
from turnwise.ext.sandbox.results import ExecutionStatus
from turnwise.reports.checks.findings import Outcome
from turnwise.reports.dry_run import dry_run
from turnwise.reports.preflight import preflight
from turnwise.reports.training import TrainReport
from turnwise.train import train

SMALL = (
    "rollout.tools=[calculate]", "rollout.interaction=null", "training.groups=3", "training.group_size=4",
    "training.samples=24", "eval.samples=3", "training.eval_every=0", "engine.threads=1", "sampling.max_tokens=40",
    "training.max_lag=0", "training.save_every=2",
)  # fmt: skip
SCORER = """
import os, signal

def by_letters(trajectory):
    mark = "{mark}"
    if trajectory.step == 1 and {deadly} and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return sum(trajectory.messages[-1].text.encode()) % 7 / 7
"""


class Watching(io.StringIO):
    """What a run says; acts once, where a text appears, before the run goes on."""

    def __init__(self, actions: dict[str, Callable[[], None]]) -> None:
        super().__init__()
        self._actions = dict(actions)

    def write(self, text: str) -> int:
        written = super().write(text)
        for mark in [mark for mark in self._actions if mark in self.getvalue()]:
            self._actions.pop(mark)()
        return written


def watching(actions: dict[str, Callable[[], None]]) -> Console:
    return Console(file=Watching(actions), width=400)


def scorer(folder: Path, *, deadly: bool) -> str:
    """A reward that differs between siblings; a deadly one kills its own process once, in the second step."""
    path = folder / f"scorer_{deadly}.py"
    path.write_text(SCORER.format(mark=folder / "died", deadly=deadly))
    return f"{path}:by_letters"


def run(folder: Path, console: Console, *overrides: str, deadly: bool = False) -> TrainReport:
    scoring = f"scoring.scorers={{default: '{scorer(folder, deadly=deadly)}'}}"
    return train(configure(*SMALL, f"runs_dir={folder}", scoring, *overrides), console=console)


def weights(report: TrainReport, step: int) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(
        report.run / "checkpoints" / f"step_{step:06d}" / "learner.safetensors"
    )
    return tensors


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lines(report: TrainReport) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (report.run / "metrics.jsonl").read_text().splitlines()]


def last_line(report: TrainReport) -> dict[str, Any]:
    return next(line for line in reversed(lines(report)) if "cluster/samplers" in line)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_run_with_kills_gives_the_numbers_of_one_process(
    tmp_path: Path, nodes: Any, exact_engine: None, workers: int
) -> None:
    alone = run(tmp_path, Console(quiet=True), "run=alone", "training.steps=4")
    console = watching({
        "step 1/4": lambda: nodes.kill("SamplerActor"),
        "step 2/4": lambda: nodes.kill("EpisodeActor") if workers else None,
        "step 3/4": lambda: nodes.kill("LearnerActor"),
    })  # fmt: skip
    report = run(
        tmp_path, console, "run=there", "training.steps=4", "cluster=ray", f"ray.address={nodes.address}",
        "ray.samplers=2", "ray.scorers=1", f"rollout.workers={workers}", "ray.service_cpus=0.5", deadly=True,
    )  # fmt: skip
    text = said(console)
    assert report.rewards == alone.rewards and any(one.has_signal for one in alone.rewards), text
    there, here = weights(report, 4), weights(alone, 4)
    assert there.keys() == here.keys() and all(torch.equal(there[name], here[name]) for name in here)
    assert (tmp_path / "died").exists(), "the scorer killed itself"
    metrics = last_line(report)
    losses = {kind: metrics[f"cluster/{kind}_lost"] for kind in ("sampler", "scorer", "learner")}
    assert losses == {"sampler": 1.0, "scorer": 1.0, "learner": 1.0}, text
    assert "restored from checkpoint step_000002, 2 update(s) repeated" in text, text
    assert sum(one.get("rollout/workers_lost", 0.0) for one in lines(report)) == min(workers, 1), text
    for kind in ("SamplerActor", "LearnerActor", "ScorerActor", "EpisodeActor"):
        assert nodes.wait_without(kind) == [], "nothing is left of a run"


def test_a_sandbox_that_dies_is_made_anew_with_what_it_remembered(nodes: Any) -> None:
    cluster = RayConfig(address=nodes.address, sandboxes=2)
    config = SandboxConfig(preload=[])

    async def main() -> tuple[list[str | None], list[str]]:
        notes: list[str] = []
        values = []
        listens = cluster_connection(cluster, notes.append, hang_seconds=4.0)
        async with listens as connection, ClusterPool(cluster, config, 1000) as pool:
            session = pool.session(seed=7)
            other = pool.session(seed=8)
            for code in ("x = 41", "import random; random.random()"):
                values.append((await session.run(code)).value)
            assert (await other.run("x")).status is ExecutionStatus.ERROR, "another session has no such variable"
            for pid in nodes.actors("SandboxActor"):
                os.kill(pid, signal.SIGKILL)
            values += [(await session.run(code)).value for code in ("x + 1", "random.random()")]
            await session.close()
            frozen = pool.session(seed=9)
            values.append((await frozen.run("y = 6")).value)
            for pid in nodes.actors("SandboxActor"):
                os.kill(pid, signal.SIGSTOP)
            values.append((await frozen.run("y * 7")).value)
            again = pool.session(seed=7)
            values += [(await again.run(code)).value for code in ("import random; random.random()", "random.random()")]
            lost.append(connection.lost["sandbox"])
        return values, notes

    lost: list[int] = []
    values, notes = asyncio.run(main())
    assert values[4:6] == [None, "42"], "one that stands still is replaced as one that died"
    assert values[:3] == [None, values[6], "42"] and values[3] == values[7]
    silent = [note for note in notes if "has given no sign of life for 4 s; another one takes its place" in note]
    assert silent and len([note for note in notes if "takes its place" in note]) == lost[0] >= 2, notes
    assert nodes.wait_without("SandboxActor") == [], "also what stands still is ended"


def test_a_cluster_without_room_is_told_at_once_with_who_would_be_where(nodes: Any) -> None:
    large = ("ray.samplers=8", "ray.sampler_gpus=1", "learner.processes=2", "ray.learner_gpus=1")
    asked = [
        *(key for key in SMALL if key != "engine.threads=1"),
        "cluster=ray", f"ray.address={nodes.address}", "ray.wait_seconds=3600", "ray.scorers=1",
        *large, "learner.device=cuda", "engine=vllm_server",
    ]  # fmt: skip
    sums = (
        "learner 2 x (1 CPUs, 1 GPUs) + samplers 8 x (1 CPUs, 1 GPUs) + scorers 1 x (1 CPUs, 0 GPUs) = 11 CPUs, 10 GPUs"
    )
    report = preflight(compose(asked))
    words = [one for one in report.findings if one.check == "cluster" and one.outcome is Outcome.WARNING]
    assert len(words) == 1 and sums in words[0].text and "2 of 2 learner, 8 of 8 samplers; the run" in words[0].text
    assert report.passed, "nodes may join later"
    notes: list[str] = []
    with pytest.raises(ConfigError, match="--dry-run: the cluster has no room now: 2 of 2 learner") as refused:
        asyncio.run(dry_run(configure(*asked), notes.append))
    assert sums in str(refused.value) and any("scorers 1" in note for note in notes)
    small = [*SMALL, "cluster=ray", f"ray.address={nodes.address}", "ray.wait_seconds=3600"]
    report = preflight(compose([*small, "ray.scorers=1", "ray.service_cpus=100"]))
    (error,) = report.errors
    assert error.text.startswith("no room to try out scorers and sandboxes: 1 of 1 scorers; the run asks for"), error


@pytest.mark.long
def test_actors_of_every_kind_that_stand_still_are_replaced(tmp_path: Path, nodes: Any, exact_engine: None) -> None:
    alone = run(tmp_path, Console(quiet=True), "run=alone", "training.steps=4")
    console = watching({
        "step 1/4": lambda: nodes.freeze("ScorerActor"),
        "step 2/4": lambda: nodes.freeze("LearnerActor"),
        "step 3/4": lambda: [nodes.freeze(kind) for kind in ("SamplerActor", "EpisodeActor")],
    })  # fmt: skip
    report = run(
        tmp_path, console, "run=there", "training.steps=4", "cluster=ray", f"ray.address={nodes.address}",
        "ray.samplers=2", "ray.scorers=1", "rollout.workers=2", "ray.service_cpus=0.5", "learner.hang_seconds=10",
    )  # fmt: skip
    text = said(console)
    assert report.rewards == alone.rewards and any(one.has_signal for one in alone.rewards), text
    there, here = weights(report, 4), weights(alone, 4)
    assert all(torch.equal(there[name], here[name]) for name in here), text
    assert "scorer 1 has given no sign of life for 10 s; another one takes its place" in text, text
    assert "the learner has given no sign of life for 10 s (learner.hang_seconds) and is ended" in text, text
    assert re.search(r"episode worker \d on .* has given no sign of life for 10 s and is ended", text), text
    assert sum(one.get("rollout/workers_lost", 0.0) for one in lines(report)) == 1, text
    metrics = last_line(report)
    assert {kind: metrics[f"cluster/{kind}_lost"] for kind in ("sampler", "scorer", "learner")} == {
        "sampler": 1.0, "scorer": 1.0, "learner": 1.0,
    }, text  # fmt: skip
    for kind in ("SamplerActor", "LearnerActor", "ScorerActor", "EpisodeActor"):
        assert nodes.wait_without(kind) == [], "nothing is left of a run"


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 4])
def test_a_node_that_goes_away_costs_no_step(
    tmp_path: Path, nodes: Any, exact_engine: None, capfd: pytest.CaptureFixture[str], workers: int
) -> None:
    alone = run(tmp_path, Console(quiet=True), "run=alone", "training.steps=3")
    taken = nodes.add(), nodes.add()

    def switch_off() -> None:
        nodes.remove(next(one for one in taken if nodes.actors("SamplerActor", one)))

    console = watching({"step 1/3": switch_off})
    report = run(
        tmp_path, console, "run=there", "training.steps=3", "cluster=ray", f"ray.address={nodes.address}",
        "ray.samplers=4", f"ray.sampler_cpus={1 if workers else 2}", f"rollout.workers={workers}",
    )  # fmt: skip
    text = said(console)
    assert report.reason == "all 3 steps done" and report.rewards == alone.rewards, text
    there, here = weights(report, 3), weights(alone, 3)
    assert all(torch.equal(there[name], here[name]) for name in here), text
    assert last_line(report)["cluster/sampler_lost"] >= 1, text
    assert capfd.readouterr() == ("", ""), "what Ray says of it is in its log"
    log = (report.run / "ray.log").read_text()
    assert "[state-dump]" in log or "Raylet is terminated" in log


@pytest.mark.long
def test_a_node_that_joins_later_gets_a_sampler(nodes: Any) -> None:
    from turnwise.ext.ray.placement import open_pool

    room = 2 * len(nodes.cluster.list_all_nodes())
    config = configure(
        "cluster=ray", f"ray.address={nodes.address}", f"ray.samplers={room // 2 + 1}", "ray.sampler_cpus=2",
        "engine.threads=1",
    )  # fmt: skip
    notes: list[str] = []

    async def main() -> tuple[int, int]:
        async with (
            cluster_connection(section(config, RayConfig), notes.append),
            open_pool(config, notes.append) as pool,
        ):
            before = len(pool.names)
            nodes.add()
            while len(pool.names) <= room // 2:
                await asyncio.sleep(0.1)
            return before, len(pool.names)

    before, after = asyncio.run(asyncio.wait_for(main(), 300))
    assert before <= room // 2 and after == room // 2 + 1
    assert any("joined" in note and "sampler" in note for note in notes), notes


@pytest.mark.long
def test_a_cluster_that_a_run_starts_ends_with_it(tmp_path: Path) -> None:
    """By the end of the run, and by a signal in the middle."""
    settings = [*SMALL, "cluster=ray", f"runs_dir={tmp_path}", "training.steps=1000", "run=stopped"]
    settings += ["learner.processes=2", "ray.scorers=1"]
    heard: dict[str, list[str]] = {}
    reachable: dict[str, list[str]] = {}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    process = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
         "from turnwise.commands.cli import main; import sys; sys.exit(main(sys.argv[1:]))", "train", *settings],
        env=environment | {"HOME": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "step 2/1000" in line:
            every = [process.pid, *below([process.pid])]
            heard, reachable = listening(every), elsewhere(every)
            process.send_signal(signal.SIGINT)
    assert process.wait(timeout=300) == 0, "".join(lines)
    assert sum("RankActor" in who for who in heard) == 2 and reachable == {}, "all of it is on loopback alone"
    assert any("stopped by a signal" in line for line in lines), "".join(lines)
    assert not (tmp_path / ".ray").exists(), "no token is left in the home folder"
    deadline = time.monotonic() + 60
    while (left := of_session(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


def of_session(session: int) -> list[str]:
    """Titles of the processes that were started in a session."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getsid(int(entry.name)) == session:
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found
