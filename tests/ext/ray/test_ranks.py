"""A learner whose ranks are actors on several nodes: the numbers of one process, whoever is killed or hangs meanwhile."""

import asyncio
import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from turnwise import configure
from turnwise.config.sections import section
from turnwise.engines.learners.process_group import LearnerLost
from turnwise.engines.learners.state import read_state
from turnwise.engines.opener import LearnerParts
from turnwise.engines.rendering import make_renderer
from turnwise.ext.fsdp.opening import open_over_ranks
from turnwise.ext.ray.config import RayConfig
from turnwise.ext.ray.connection import joined
from turnwise.ext.ray.ranks import ActorRanks
from turnwise.reports.training import TrainReport
from turnwise.train import train

SMALL = (
    "rollout.tools=[calculate]", "rollout.interaction=null", "training.groups=3", "training.group_size=4",
    "training.samples=24", "eval.samples=3", "training.eval_every=0", "engine.threads=1", "sampling.max_tokens=40",
    "training.max_lag=0", "training.save_every=1",
)  # fmt: skip
RANKS = ("cluster=ray", "learner.processes=2", "ray.learner_cpus=2")
"""A node of the tests has two CPUs: the ranks are on two nodes."""


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


def run(folder: Path, said: io.StringIO, *overrides: str) -> TrainReport:
    scorer = folder / "scorer.py"
    scorer.write_text("def by_letters(trajectory):\n    return sum(trajectory.messages[-1].text.encode()) % 7 / 7\n")
    scoring = f"scoring.scorers={{default: '{scorer}:by_letters'}}"
    config = configure(*SMALL, f"runs_dir={folder}", scoring, *overrides)
    try:
        return train(config, console=Console(file=said, width=400))
    except BaseException:
        print(said.getvalue())
        raise


def numbers(report: TrainReport, name: str) -> list[float]:
    lines = [json.loads(line) for line in (report.run / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def close(one: TrainReport, two: TrainReport, step: int) -> None:
    for name in ("actor/pg_loss", "actor/grad_norm"):
        assert numbers(one, name)[:step] == pytest.approx(numbers(two, name)[:step], rel=1e-5, abs=1e-5), name
    mine, theirs = (read_state(report.run / f"checkpoints/step_{step:06d}")[0] for report in (one, two))
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-5, rtol=1e-5)


@pytest.mark.long  # tests/ext/fsdp/test_sharded.py has the numbers, tests/ext/ray/test_ray.py the kills
def test_ranks_on_two_nodes_give_the_numbers_of_one_process_and_one_may_die(tmp_path: Path, nodes: Any) -> None:
    alone = run(tmp_path, io.StringIO(), "run=alone", "training.steps=4")
    said = Watching({"step 2/3": lambda: os.kill(nodes.actors("RankActor")[1], signal.SIGKILL)})
    there = run(tmp_path, said, "run=there", "training.steps=3", f"ray.address={nodes.address}", *RANKS)
    text = said.getvalue()
    assert there.rewards == alone.rewards[:3] and any(one.has_signal for one in alone.rewards), text
    close(alone, there, 3)
    assert numbers(there, "cluster/learner_lost")[-1] == 1.0, text
    assert "rank 1 of 2 on " in text and "restored from checkpoint step_000001, 2 update(s) repeated" in text, text
    assert ": rank 0; " in text and ": rank 1" in text, "on two nodes"
    for kind in ("SamplerActor", "LearnerActor", "RankActor"):
        assert nodes.wait_without(kind) == [], "nothing is left of a run"
    one = ("cluster=none", "learner.processes=1")
    more = run(tmp_path, io.StringIO(), "run=there", "resume=auto", "training.steps=4", *one)
    assert more.steps == 4 and more.rewards == alone.rewards
    close(alone, more, 4)


@pytest.mark.long
def test_a_rank_that_is_stopped_is_noticed_and_ended(nodes: Any) -> None:
    """As a machine that has frozen: Ray itself sees a process that is there."""
    config = configure("cluster=ray", f"ray.address={nodes.address}", "learner.processes=2", "ray.learner_cpus=2")
    parts = LearnerParts(1)

    async def main() -> None:
        connection = await joined(section(config, RayConfig), 2)
        group = connection.ray.util.placement_group([{"CPU": 2}] * 2, strategy="PACK")
        await group.ready()
        ranks = ActorRanks(group, ("cpu", "cpu"), section(config, RayConfig), 1800.0)
        learner = await asyncio.to_thread(open_over_ranks, config, make_renderer(config), parts, ranks, print)
        assert len({home.node for home in ranks.homes}) == 2
        ranks._limit = 3.0
        os.kill(nodes.actors("RankActor")[1], signal.SIGSTOP)
        with pytest.raises(
            LearnerLost, match=r"hangs in `begin_weights`.*rank [01] of 2 has given no sign of life for 3 s"
        ):
            await asyncio.to_thread(lambda: list(learner.weights().tensors))
        async with asyncio.timeout(60):
            while nodes.actors("RankActor"):
                await asyncio.sleep(0.1)
        connection.ray.util.remove_placement_group(group)

    asyncio.run(main())


@pytest.mark.long
@pytest.mark.parametrize("first", [True, False])
def test_a_node_with_a_rank_that_is_switched_off_costs_no_step(first: bool, tmp_path: Path, nodes: Any) -> None:
    """That of the first rank, where the learner's own actor is too, or that of the other."""
    alone = run(tmp_path, io.StringIO(), "run=alone", "training.steps=3")
    for _ in range(3):
        nodes.add(4)  # larger than the head, which the loop is connected to and which cannot be switched off

    def switch_off() -> None:
        held = [one for one in nodes.cluster.list_all_nodes() if nodes.actors("RankActor", one)]
        nodes.remove(next(one for one in held if bool(nodes.actors("LearnerActor", one)) is first))

    said = Watching({"step 2/3": switch_off})
    there = run(
        tmp_path,
        said,
        "run=there",
        "training.steps=3",
        "training.save_every=1",
        f"ray.address={nodes.address}",
        *RANKS,
        "ray.learner_cpus=2.5",  # two threads, as alone, and more than the head has
    )
    text = said.getvalue()
    assert there.rewards == alone.rewards and there.reason == "all 3 steps done", text
    close(alone, there, 3)
    assert "restored from checkpoint step_00000" in text, text  # noticed in the last step, no metric counts it any more
