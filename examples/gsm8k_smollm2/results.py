"""What the stages of run.py came to: OUT/report/ gets a page, the numbers as JSON, a curve and a few transcripts.

python examples/gsm8k_smollm2/results.py OUT     # again, from the runs that are there
"""

import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import yaml
from rich.console import Console

from turnwise.config import Config
from turnwise.config.sections import flat
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.storage.transcript import transcript
from turnwise.system.metrics import Share
from turnwise.types import Trajectory

FIRST = Path("eval") / "step_000000.json"
SOURCE = "openai/gsm8k"
SMOOTHED = 10
"""Steps that a point of the reward's curve is the mean of."""
Numbers = dict[str, Any]


def write(out: Path) -> str:
    """Write OUT/report from the runs that are there; gives the page."""
    runs, folder = out / "runs", out / "report"
    found = collect(runs)
    folder.mkdir(exist_ok=True)
    (folder / "results.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    draw(runs, found, folder / "curve.svg")
    (folder / "transcripts.md").write_text(transcripts(runs, found), encoding="utf-8")
    page = "\n".join(_page(found)) + "\n"
    (folder / "README.md").write_text(page, encoding="utf-8")
    return page


def collect(runs: Path) -> Numbers:
    """Every measurement: before, and for each seed after the cold start and after RL, with what each stage took."""
    before = {way: _evaluated(runs / f"before_{way}") for way in ("greedy", "sampled")}
    recited = json.loads((runs / "demonstrations" / FIRST).read_text(encoding="utf-8"))
    seeds = {}
    for run in sorted(runs.glob("rl_*")):
        seed, steps = run.name.removeprefix("rl_"), _lines(run, "groups/total")
        if steps:
            taught = runs / f"cold_start_{seed}"
            seeds[seed] = {
                "cold_start": _measured(run, 0) | _cost(taught, _lines(taught, "sft/loss"), "sft/loss"),
                "settings": _settings(taught, "sft") | _settings(run, "training", "algorithm", "learner"),
                "rl": _measured(run, steps[-1]["step"]) | _cost(run, steps, "critic/score/mean"),
            }
    return {
        "problems": before["greedy"]["n"],
        "demonstrations": {"played": recited["n"], "right": round(recited["n"] * recited["accuracy"])},
        "before": before,
        "seeds": seeds,
    }


def _evaluated(run: Path) -> Numbers:
    found = json.loads((run / FIRST).read_text(encoding="utf-8"))
    first = found["sources"][SOURCE]
    return {"accuracy": found["accuracy"], "stderr": found["accuracy_stderr"], "n": found["n"]} | {
        "first": first["first_accuracy"], "seconds": found["seconds"],
    }  # fmt: skip


def _measured(run: Path, step: int) -> Numbers:
    """Of an evaluation by a training run, which has both ways."""
    path = run / "eval" / f"step_{step:06d}.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    ways = {"greedy": "greedy_", "sampled": ""}
    return {
        way: {
            "accuracy": found[f"{name}accuracy"],
            "stderr": found[f"{name}accuracy_stderr"],
            "n": int(found[f"{name}accuracy_n"]),
            "first": found.get(f"{name}first_accuracy/{SOURCE}"),
        }
        for way, name in ways.items()
        if f"{name}accuracy" in found
    }


def _cost(run: Path, lines: list[Numbers], shown: str) -> Numbers:
    """Steps, what one took, the whole run with its evaluations, and how a metric went: first ten steps and last ten."""
    whole = max((line["seconds"] for line in _lines(run, "seconds")), default=0.0)
    values = [line[shown] for line in lines if line.get(shown) is not None]
    ends = [_mean(values[:SMOOTHED]), _mean(values[-SMOOTHED:])] if values else []
    return {
        "steps": lines[-1]["step"] if lines else 0,
        "seconds": whole,
        "step_seconds": round(_mean([line["timing_s/step"] for line in lines]), 3) if lines else 0.0,
        shown: [round(value, 4) for value in ends],
    }


def _settings(run: Path, *parts: str) -> Numbers:
    """What a run set otherwise than the defaults, in these parts of its config."""
    config, usual = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")), flat(Config())
    chosen = {f"{part}.{name}": value for part in parts for name, value in config[part].items()}
    return {key: value for key, value in chosen.items() if key not in usual or value != usual[key]}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _lines(run: Path, having: str) -> list[Numbers]:
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if having in line]


def _page(found: Numbers) -> Iterator[str]:
    played, right = found["demonstrations"].values()
    yield from (
        "# SmolLM2-135M-Instruct on GSM8K", "",
        f"All {found['problems']:,} test problems; the calculator is a tool, and a user doubts each first answer. "
        "± is one standard error. `examples/gsm8k_smollm2` makes this page.", "",
        "| share right, final answer (first answer) | greedy | sampled at temperature 1 |", "|---|---|---|",
        _row("as it comes", found["before"]),
    )  # fmt: skip
    for seed, stages in found["seeds"].items():
        yield _row(f"after the cold start, seed {seed}", stages["cold_start"])
        yield _row(f"after RL, seed {seed}", stages["rl"])
    yield ""
    for seed, stages in found["seeds"].items():
        for name, title, shown in (("cold_start", "cold start", "sft/loss"), ("rl", "RL", "critic/score/mean")):
            cost = stages[name]
            course = " to ".join(f"{value:.3f}" for value in cost[shown])
            spent = f"{cost['steps']} steps of {cost['step_seconds']:.2f} s, {cost['seconds']:.0f} s in all"
            yield f"- {title}, seed {seed}: {spent}; {shown} from {course}"
    for settings in [stages["settings"] for stages in found["seeds"].values()][:1]:
        yield f"- settings: {', '.join(f'`{key}={value}`' for key, value in settings.items())}"
    yield f"- demonstrations: {right:,} of {played:,} played with the real tool and user are right; those are learned"
    yield from ("", "![training reward and accuracy over the steps](curve.svg)", "", "[Transcripts](transcripts.md)")


def _row(name: str, ways: Numbers) -> str:
    cells = [name]
    for way in ("greedy", "sampled"):
        one = ways.get(way)
        shown = "-" if one is None else str(Share(one["accuracy"], one["stderr"], one["n"], one["n"]))
        cells.append(shown if one is None or one["first"] is None else f"{shown} ({one['first']:.1%})")
    return f"| {' | '.join(cells)} |"


def draw(runs: Path, found: Numbers, path: Path) -> None:
    """Training reward, and accuracy on the test problems with its error, over the steps."""
    figure, axes = plt.subplots(figsize=(7.2, 3.4))
    for number, seed in enumerate(found["seeds"]):
        run, colour = runs / f"rl_{seed}", f"C{number}"
        rewards = [(line["step"], line["critic/score/mean"]) for line in _lines(run, "critic/score/mean")]
        steps, values = zip(*rewards, strict=True)
        means = [_mean(values[max(0, at - SMOOTHED + 1) : at + 1]) for at in range(len(values))]
        axes.plot(steps, means, color=colour, lw=0.8, alpha=0.6, label=f"training reward, seed {seed}")
        for name, mark, line in (("val/accuracy", "o", "-"), ("val/greedy_accuracy", "s", "none")):
            points = [(one["step"], one[name], one[f"{name}_stderr"]) for one in _lines(run, name)]
            steps, values, errors = zip(*points, strict=True)
            label = f"test, {'greedy' if 'greedy' in name else 'sampled'}, seed {seed}"
            axes.errorbar(steps, values, errors, color=colour, marker=mark, ls=line, ms=4, capsize=2, label=label)
    axes.set(xlabel="GRPO steps", ylabel="share right", ylim=(0, None))
    axes.legend(frameon=False, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def transcripts(runs: Path, found: Numbers) -> str:
    """Greedy episodes after RL: the first that is right, that is wrong, and that the doubt mended."""
    pages = ["# Greedy episodes after RL"]
    for seed, stages in list(found["seeds"].items())[:1]:
        path = runs / f"rl_{seed}" / "eval" / f"greedy_step_{stages['rl']['steps']:06d}.parquet"
        played = read_trajectories(path) if path.exists() else []
        kinds = {
            "Right": lambda one: one.right and one.first_right and len(one.calls) > 2,
            "Wrong": lambda one: one.right is False,
            "Mended after the doubt": lambda one: one.right and one.first_right is False,
            "Spoilt after the doubt": lambda one: one.right is False and one.first_right,
        }
        for title, fits in kinds.items():
            some = next(filter(fits, played), None)
            pages += [] if some is None else [f"## {title}", f"```text\n{_plain(some)}\n```"]
    return "\n\n".join(pages) + "\n"


def _plain(trajectory: Trajectory) -> str:
    out = io.StringIO()
    Console(file=out, width=110, color_system=None).print(transcript(trajectory))
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines()).replace("```", "'''")


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
