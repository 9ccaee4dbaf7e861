"""Whole evaluations with 0, 1, 2 and 4 episode workers and an engine that costs nothing: turns a second, CPU a turn.

Each episode of the bundled task calls a calculator five times and answers: six short turns, rendered, read, checked by
share, scored and written to parquet. The engine gives turns that lie ready, so all that is measured is what the host
does around an engine. Every figure is the difference of a small and a large evaluation, so that starting costs nothing.
The peer is the same run without workers, in the same call.

With --model a model writes: six turns of 40 tokens and five calls whatever it says, 8 siblings of each sample, on the
GPU where there is one. `tokens/s` are the policy's.

    python benchmarks/workers.py [--workers 0 1 2 4] [--samples 250 1000]
    python benchmarks/workers.py --model FOLDER [--workers 0 2 4] [--samples 16 80]
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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnwise.engines.samplers.request import Request
from turnwise.engines.samplers.sampler import Capabilities, Logprobs
from turnwise.types import Completion, FinishReason, ToolCall

CALLS, TURN_TOKENS, SIBLINGS = 5, 40, 8
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


async def six_turns(chat: Any) -> None:
    """An agent loop that calls the calculator after each turn but the last, whatever the policy wrote."""
    for number in range(CALLS):
        message = await chat.generate(max_tokens=TURN_TOKENS)
        call = ToolCall(f"call_{number}", "calculate", {"expression": f"{number} + 17"})
        chat.add(await chat.call_tools(replace(message, tool_calls=(call,))))
    await chat.generate(max_tokens=TURN_TOKENS)


def evaluate(workers: int, samples: int, runs: Path, model: str | None) -> None:
    """One evaluation, in a process of its own; its figures as JSON."""
    import turnwise as tw

    here = Path(__file__).resolve()
    of_model = [f"model.path={model}", f"rollout.agent={here}:six_turns", f"eval.group_size={SIBLINGS}"]
    of_model += [f"sampling.max_tokens={TURN_TOKENS + 1}"]
    config = tw.configure(
        *([f"engine={here}:ReadyTurns"] if model is None else of_model),
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
        "tokens": sum(turn.completion_tokens for trajectory in report.trajectories for turn in trajectory.turns),
    }
    print(json.dumps(figures))


def measured(workers: int, samples: int, model: str | None) -> dict[str, float]:
    """The figures of one evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--one", str(workers), str(samples), folder]
        command += [] if model is None else ["--model", model]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return figures


def main(arguments_of: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--samples", type=int, nargs=2, help="of the small and the large one")
    parser.add_argument("--model", help="a Hugging Face folder of a model that writes, or tiny")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args(arguments_of)
    if arguments.one:
        evaluate(int(arguments.one[0]), int(arguments.one[1]), Path(arguments.one[2]), arguments.model)
        return
    few, many = arguments.samples or ((250, 1000) if arguments.model is None else (16, 80))
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; {few} and {many} samples")
    print(
        f"{'workers':>8}{'turns/s':>10}{'ratio':>8}{'tokens/s':>10}   ms of CPU a turn: run{'workers':>10}{'both':>8}"
    )
    peer = None
    for workers in arguments.workers:
        small, large = (measured(workers, samples, arguments.model) for samples in (few, many))
        grown = {name: large[name] - small[name] for name in large}
        rate, tokens = (grown[name] / max(grown["seconds"], 1e-9) for name in ("turns", "tokens"))
        peer = peer or rate
        here, there = (1000 * grown[name] / grown["turns"] for name in ("here", "workers"))
        costs = f"{here:>24.3f}{there:>10.3f}{here + there:>8.3f}"
        print(f"{workers:>8}{rate:>10,.0f}{rate / peer:>8.2f}{tokens:>10,.0f}{costs}")


if __name__ == "__main__":
    main()
