"""Whole evaluations with 0, 1, 2 and 4 episode workers and an engine that costs nothing: turns a second, CPU a turn.

Each episode of the bundled task calls a calculator five times and answers: six short turns, rendered, read, checked by
share, scored and written to parquet. The engine gives turns that lie ready, so all that is measured is what the host
does around an engine. Every figure is the difference of a small and a large evaluation, so that starting costs nothing.
The peer is the same run without workers, in the same call.

    python benchmarks/workers.py [--workers 0 1 2 4] [--samples 250 1000]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from turnwise.engines.samplers.request import Request
from turnwise.engines.samplers.sampler import Capabilities, Logprobs
from turnwise.types import Completion, FinishReason

CALLS = 5
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "%d + 17"}}\n</tool_call>'


class ReadyTurns:
    """An engine whose turns lie ready: five calls of the calculator, then an answer."""

    capabilities = Capabilities(Logprobs.SCALED, frozenset())
    context_length = 4096

    def __init__(self, config: Any, source: Any, tokenizer: Any) -> None:
        texts = [*(CALL % number for number in range(CALLS)), "#### 42"]
        ids = [[*tokenizer.encode(text + "<|im_end|>").ids] for text in texts]
        self._turns = [Completion.of(each, [-0.5] * len(each), FinishReason.STOP, version=0) for each in ids]
        self._said = Counter[str]()

    async def generate(self, request: Request) -> Completion:
        """The conversation's next turn."""
        number = self._said[request.conversation]
        self._said[request.conversation] += 1
        return self._turns[min(number, CALLS)]

    async def release(self, conversation: str) -> None:
        """Forget it."""
        self._said.pop(conversation, None)

    async def close(self) -> None:
        """Nothing is held."""

    async def publish(self, update: object, version: int) -> None:
        """It has no weights."""

    sleep = wake = close


def evaluate(workers: int, samples: int, runs: Path) -> None:
    """One evaluation, in a process of its own; its figures as JSON."""
    import turnwise as tw

    config = tw.configure(
        f"engine={Path(__file__).resolve()}:ReadyTurns",
        "rollout.tools=[calculate]",
        "rollout.interaction=null",
        f"rollout.workers={workers}",
        f"eval.samples={samples}",
        f"runs_dir={runs}",
    )
    start = time.perf_counter()
    report = tw.evaluate(config)
    turns = sum(len(trajectory.turns) for trajectory in report.trajectories)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = {
        "seconds": time.perf_counter() - start,
        "here": time.process_time(),
        "workers": children.ru_utime + children.ru_stime,
        "turns": turns,
    }
    print(json.dumps(figures))


def measured(workers: int, samples: int) -> dict[str, float]:
    """The figures of one evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--one", str(workers), str(samples), folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--samples", type=int, nargs=2, default=[250, 1000], help="of the small and the large one")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        evaluate(int(arguments.one[0]), int(arguments.one[1]), Path(arguments.one[2]))
        return
    few, many = arguments.samples
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; {few} and {many} samples")
    print(f"{'workers':>8}{'turns/s':>10}{'ratio':>8}{'ms of CPU a turn: run':>24}{'workers':>10}{'both':>8}")
    peer = None
    for workers in arguments.workers:
        small, large = measured(workers, few), measured(workers, many)
        grown = {name: large[name] - small[name] for name in large}
        rate = grown["turns"] / max(grown["seconds"], 1e-9)
        peer = peer or rate
        here, there = (1000 * grown[name] / grown["turns"] for name in ("here", "workers"))
        print(f"{workers:>8}{rate:>10,.0f}{rate / peer:>8.2f}{here:>24.3f}{there:>10.3f}{here + there:>8.3f}")


if __name__ == "__main__":
    main()
