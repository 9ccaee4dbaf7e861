"""Seconds of a training step with the learner in the run's process and in one of its own, at max_lag 0 and 1.

The bundled model and task, a calculator, several turns, one thread each for sampler and learner (`engine.threads=1`).
Each setting runs in a process of its own, in turn with the others; start-up and the first step do not count. The peer
is the first row of the same round, so that other programs on the machine slow all of them.

    python benchmarks/learner_place.py [--steps 6] [--rounds 3] [--groups 8] [--siblings 8]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SETTINGS = [(0, "here"), (0, "process"), (1, "here"), (1, "process")]
PARTS = {"timing_s/step": "step", "timing_s/gen": "collect", "timing_s/update_actor": "learn"}


def one(lag: int, place: str, arguments: argparse.Namespace) -> None:
    """Train, and print the seconds of each step's parts."""
    from rich.console import Console

    from turnwise.data.task_config import configure
    from turnwise.train import train

    with tempfile.TemporaryDirectory() as folder:
        config = configure(
            "task=arithmetic", "rollout.tools=[calculate]", "rollout.interaction=null", "sampling.max_tokens=96",
            f"training.steps={1 + arguments.steps}", f"training.groups={arguments.groups}",
            f"training.group_size={arguments.siblings}", f"training.max_lag={lag}", f"learner.place={place}",
            "training.eval_every=0", "training.save_every=0", "eval.samples=1", "engine.threads=1",
            "algorithm.advantage=grpo", "algorithm.entropy=0.001", f"runs_dir={folder}", "run=benchmark",
        )  # fmt: skip
        run = train(config, console=Console(file=sys.stderr)).run
        lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "timing_s/step" in line][1:]
    print(json.dumps({name: [step[key] for step in steps] for key, name in PARTS.items()}))


def measured(lag: int, place: str, arguments: argparse.Namespace) -> dict[str, float]:
    """The means of a run's steps."""
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("steps", "groups", "siblings")]
    command = [sys.executable, __file__, *sizes, "--one", str(lag), place]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"max_lag={lag}, learner.place={place} failed:\n{done.stdout}\n{done.stderr}")
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return {name: statistics.fmean(seconds) for name, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="measured steps of each run, after one that is not")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each setting, in turn")
    parser.add_argument("--groups", type=int, default=8, help="of a step")
    parser.add_argument("--siblings", type=int, default=8, help="episodes of a group")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(int(arguments.one[0]), arguments.one[1], arguments)
        return
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; steps of {arguments.groups} x "
          f"{arguments.siblings} episodes, {arguments.rounds} x {arguments.steps} of them", flush=True)  # fmt: skip
    rounds = [{setting: measured(*setting, arguments) for setting in SETTINGS} for _ in range(arguments.rounds)]
    names = "".join(f"{name + ' s':>12}" for name in PARTS.values())
    print(f"{'max_lag':>8}{'place':>9}{names}{'ratio':>8}  each")
    for setting in SETTINGS:
        means = [statistics.median(found[setting][name] for found in rounds) for name in PARTS.values()]
        ratios = [found[setting]["step"] / found[SETTINGS[0]]["step"] for found in rounds]
        row = "".join(f"{mean:>12.3f}" for mean in means) + f"{statistics.median(ratios):>8.2f}"
        print(f"{setting[0]:>8}{setting[1]:>9}{row}  {' '.join(f'{ratio:.2f}' for ratio in ratios)}")


if __name__ == "__main__":
    main()
