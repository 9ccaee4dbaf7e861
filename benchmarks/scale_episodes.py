"""Whole evaluations on a Ray cluster with 0 and more episode workers: turns a second, and CPU a turn.

Four samplers on nodes of this machine. Every episode calls a calculator five times and answers: six short turns of a
growing context, rendered, read, scored and written to parquet, with health checks on. The engine's turns lie ready,
or come after so many seconds each. Measured while episodes are played, not while actors start. Each line is a process
of its own.

    python benchmarks/scale_episodes.py [--workers 0 1 2 4] [--turn-seconds 0 2] [--samples 1000] [--at-once 200]
        [--nodes 4]
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from workers import ReadyTurns  # actors look where this process does

from turnwise import configure
from turnwise import eval as evaluation
from turnwise.engines.samplers.request import Request
from turnwise.types import Completion, Trajectory

SAMPLERS = 4
TURN_ENV = "SCALE_TURN_SECONDS"


class TimedTurns(ReadyTurns):
    """Turns that lie ready, and come after $SCALE_TURN_SECONDS each."""

    async def generate(self, request: Request) -> Completion:
        """The conversation's next turn."""
        if seconds := float(os.environ[TURN_ENV]):
            await asyncio.sleep(seconds)
        return await super().generate(request)


def cpu_of(kind: str, raylets: set[int]) -> float:
    """CPU seconds so far of all actors of a class that these have started."""
    seconds = 0.0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(f"ray::{kind}".encode()):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) in raylets:
                    seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


class Clocks:
    """What was spent while a block ran, and the turns that were played."""

    def __init__(self, raylets: set[int]) -> None:
        self._raylets, self.turns = raylets, 0
        self.spent: dict[str, float] = {}

    def see(self, trajectory: Trajectory) -> None:
        """One more has ended."""
        self.turns += len(trajectory.turns)

    def _now(self) -> dict[str, float]:
        there = {kind: cpu_of(kind, self._raylets) for kind in ("EpisodeActor", "SamplerActor")}
        return {"seconds": time.perf_counter(), "run": time.process_time()} | there

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Measure the block."""
        before = self._now()
        yield
        self.spent = {name: value - before[name] for name, value in self._now().items()}


def evaluate(workers: int, samples: int, at_once: int, nodes: int) -> None:
    """One evaluation on a cluster of its own; its figures as JSON."""
    from ray.cluster_utils import Cluster

    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "120", "RAY_worker_niceness": "0"}
    node = {"num_cpus": (SAMPLERS + workers) // nodes + 1, "object_store_memory": 200 * 2**20}
    cluster, shown = Cluster(True, head_node_args=node | {"include_dashboard": False}), evaluation._progress
    for _ in range(nodes - 1):
        cluster.add_node(**node)
    clocks = Clocks({node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()})

    @contextlib.contextmanager
    def progress(console: Console, total: int) -> Iterator[Callable[[Trajectory], None]]:
        with shown(console, total), clocks.running():
            yield clocks.see

    evaluation._progress = progress
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = configure(
                f"engine={Path(__file__).resolve()}:TimedTurns", "rollout.tools=[calculate]", "cluster=ray",
                "rollout.interaction=null", f"rollout.workers={workers}", f"eval.samples={samples}",
                f"rollout.concurrency={at_once}", f"ray.address={cluster.address}", f"ray.samplers={SAMPLERS}",
                f"runs_dir={folder}",
            )  # fmt: skip
            evaluation.evaluate(config, console=Console(quiet=True))
    finally:
        cluster.shutdown()
    print(json.dumps(clocks.spent | {"turns": clocks.turns}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--turn-seconds", type=float, nargs="+", default=[0, 2])
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=200, help="episodes")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        evaluate(args.one, args.samples, args.at_once, args.nodes)
        return
    cores, nodes = len(os.sched_getaffinity(0)), f"{SAMPLERS} samplers on {args.nodes} nodes"
    print(f"{cores} cores; {args.samples} episodes, {args.at_once} at once, {nodes}")
    for seconds in args.turn_seconds:
        for workers in args.workers:
            asked = ["--one", str(workers), "--samples", str(args.samples), "--at-once", str(args.at_once)]
            asked += ["--nodes", str(args.nodes)]
            command = [sys.executable, __file__, *asked]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", TURN_ENV: str(seconds)}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            one = json.loads(done.stdout.splitlines()[-1])
            each = {name: 1000 * one[name] / one["turns"] for name in ("run", "EpisodeActor", "SamplerActor")}
            print(
                f"turns of {seconds:g} s, {workers} workers: {one['turns'] / one['seconds']:6,.0f} turns/s; ms of CPU "
                f"a turn: the run {each['run']:.3f}, workers {each['EpisodeActor']:.3f}, samplers "
                f"{each['SamplerActor']:.3f}; load {os.getloadavg()[0]:.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
