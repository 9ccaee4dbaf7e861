"""What the runs of run.py came to: OUT/report/ gets a page, numbers as JSON, curves, and episodes with their images.

python examples/tinylook/findings.py OUT     # again, from the runs that are there
"""

import io
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import yaml
from PIL import Image as Pictures

from turnwise.config import Config
from turnwise.config.sections import flat
from turnwise.ext.tinylook import measures
from turnwise.ext.tinylook.language import Puzzle
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.system.image_sources import read_image
from turnwise.types import CallStatus, Image, Role, Trajectory

TITLES = {"accuracy": "right answers alone", "tapo": "TAPO"}
SMOOTHED = 5
"""Steps that a point of a curve is the mean of."""
ENLARGED = 3
CEILINGS = Path(__file__).resolve().parents[2] / "docs" / "results" / "tinylook" / "ceilings.md"
FREE = ("none", "prior")
"""Kinds of question that can be answered, or answered mostly, without a look."""
SHARES_RIGHT = ("accuracy", "greedy")
Numbers = dict[str, Any]


def write(out: Path) -> str:
    """Write OUT/report from the runs that are there; gives the page."""
    folder = out / "report"
    folder.mkdir(parents=True, exist_ok=True)
    found = collect(out / "runs")
    probes = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (out / "probes").glob("*.json")}
    results = json.dumps({"runs": found, "probes": probes}, indent=1)
    (folder / "results.json").write_text(results + "\n", encoding="utf-8")
    draw(found, folder / "curves.svg")
    (folder / "episodes.md").write_text("\n\n".join(_episodes(out / "runs", folder)) + "\n", encoding="utf-8")
    page = "\n".join(_page(found, probes)) + "\n"
    (folder / "README.md").write_text(page, encoding="utf-8")
    return page


def collect(runs: Path) -> Numbers:
    """By run: what was measured before and after, the course of training, and what was set."""
    found: Numbers = {}
    for run in _runs(runs):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        steps = [line for line in lines if "groups/total" in line]
        played = sorted((run / "eval").glob("step_*.parquet"))
        if steps and len(played) > 1:
            reward, _, seed = run.name.rpartition("_")
            found[run.name] = {
                "reward": reward, "seed": int(seed), "steps": steps[-1]["step"],
                "seconds": max(line.get("seconds", 0.0) for line in lines),
                "before": _measured(played[0], _greedy(lines)), "after": _measured(played[-1], _greedy(lines[::-1])),
                "course": _course(steps), "settings": _settings(run),
            }  # fmt: skip
    return found


def _runs(runs: Path) -> list[Path]:
    """Those of a reward and a seed that have something to tell."""
    named = (run for run in runs.iterdir() if run.name.rpartition("_")[0] in TITLES)
    return sorted(run for run in named if (run / "metrics.jsonl").is_file() and (run / "eval").is_dir())


def _greedy(lines: Sequence[Numbers]) -> dict[str, float]:
    """Shares right at temperature 0 by kind of question, of the first of these lines that has them."""
    start = "val/greedy_accuracy/tinylook/"
    found = next((line for line in lines if any(name.startswith(start) for name in line)), {})
    return {name.removeprefix(start): value for name, value in found.items() if name.startswith(start)}


def _measured(path: Path, greedy: dict[str, float]) -> dict[str, Numbers]:
    """By kind of question: shares of the episodes of an evaluation at temperature 1, and of right ones at 0."""
    by_puzzle: dict[str, list[Trajectory]] = defaultdict(list)
    for one in read_trajectories(path):
        by_puzzle[one.sample.data_source.rpartition("/")[2]].append(one)
    return {puzzle: _shares(played) | {"greedy": greedy.get(puzzle)} for puzzle, played in sorted(by_puzzle.items())}


def _shares(played: Sequence[Trajectory]) -> Numbers:
    found = [measures(one) for one in played]
    calls = [call for one in played for call in one.calls]
    return {
        "n": len(played),
        "accuracy": _mean([float(bool(one.right)) for one in played]),
        "looked": _mean([float(bool(one.calls)) for one in played]),
        "evidence": _mean([one["evidence"] for one in found if "evidence" in one]),
        "faithful": _mean([one["faithful"] for one in found if "faithful" in one]),
        "valid_calls": _mean([float(call.status is CallStatus.OK) for call in calls]),
    }


def _course(steps: Sequence[Numbers]) -> dict[str, list[float | None]]:
    """Metrics of the training episodes by name, a value a step."""
    names = sorted({name for line in steps for name in line if name.startswith(("train/accuracy/", "task/tinylook/"))})
    return {"step": [line["step"] for line in steps]} | {name: [line.get(name) for line in steps] for name in names}


def _settings(run: Path) -> Numbers:
    """What a run set otherwise than the defaults, where it says how it learns."""
    config, usual = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")), flat(Config())
    parts = ("training", "algorithm", "learner", "sampling", "rollout")
    chosen = {f"{part}.{name}": value for part in parts for name, value in config[part].items()}
    return {key: value for key, value in chosen.items() if key not in usual or value != usual[key]}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _page(found: Numbers, probes: Numbers) -> Iterator[str]:
    runs = sorted(found.values(), key=lambda run: (run["reward"], run["seed"]))
    puzzles = list(dict.fromkeys(puzzle for run in runs for puzzle in run["after"]))
    names = [f"{TITLES[run['reward']]}, seed {run['seed']}" for run in runs]
    first, bounds = runs[0]["before"], _ceilings()
    count = sum(one["n"] for one in first.values())
    yield from (
        "# A tiny vision-language model learns to look", "",
        f"{count} held-out images, sampled at temperature 1 where nothing else is said; ± is one standard error. "
        "*No tool* is what can be had without a look ([how it was measured](ceilings.md)). "
        "`examples/tinylook` makes this page.", "",
    )  # fmt: skip
    for key, title in (
        ("accuracy", "share right"),
        ("greedy", "share right at temperature 0"),
        ("faithful", "evidence in a look, given a right answer"),
        ("looked", "share that looked at all"),
    ):
        bound = ["no tool"] if key in SHARES_RIGHT else []
        yield from _head(title, *bound, "cold start", *names)
        for puzzle in puzzles:
            cells = [_cell(first, puzzle, key), *(_cell(run["after"], puzzle, key) for run in runs)]
            if set(cells) != {"-"}:
                yield _line(f"{puzzle} (n={first[puzzle]['n']})", *([bounds[puzzle]] if bound else []), *cells)
        yield ""
    yield from _probed(probes, {"cold_start": "cold start"} | dict(zip(_names(runs), names, strict=True)))
    for run, name in zip(runs, names, strict=True):
        yield f"- {name}: {run['steps']} steps, {run['seconds']:.0f} s with its evaluations"
    chosen = ", ".join(f"`{key}={value}`" for key, value in runs[0]["settings"].items())
    yield f"- settings: {chosen}"
    yield from ("", "![training curves](curves.svg)", "", "[Episodes](episodes.md)")


def _names(runs: Sequence[Numbers]) -> list[str]:
    return [f"{run['reward']}_{run['seed']}" for run in runs]


def _head(*cells: str) -> tuple[str, str]:
    return _line(*cells), "|" + "---|" * len(cells)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _ceilings() -> dict[str, str]:
    """What was measured without a tool, by kind of question."""
    rows = [line.strip("| \n").split(" | ") for line in CEILINGS.read_text(encoding="utf-8").splitlines()]
    return {row[0]: f"{float(row[2]):.0%}" for row in rows if len(row) == 6 and row[1][:1] in "01"}


def _probed(probes: Numbers, titles: dict[str, str]) -> Iterator[str]:
    """Shares right with the images of looks as they are and spoilt."""
    shown = [name for name in titles if name in probes]
    if not shown:
        return
    groups = {"needs a look": [one for one in Puzzle if one not in FREE], "prior": ["prior"], "none": ["none"]}
    yield from _head("share right when the images of looks are", *(titles[name] for name in shown))
    for title, kinds in groups.items():
        for probe in ("as they are", *dict.fromkeys(one["probe"] for one in probes[shown[0]])):
            cells = []
            for name in shown:
                of = [one for one in probes[name] if one["data_source"].rpartition("/")[2] in kinds]
                of = [one for one in of if one["probe"] == (of[0]["probe"] if probe == "as they are" else probe)]
                side = "before" if probe == "as they are" else "after"
                total = sum(one["n"] for one in of)
                cells.append(f"{sum(one[side] * one['n'] for one in of) / total:.0%}" if total else "-")
            yield _line(f"{title}: {probe}", *cells)
    yield ""


def _cell(measured: Numbers, puzzle: str, key: str) -> str:
    one = measured.get(puzzle, {})
    value = one.get(key)
    if value is None:
        return "-"
    error = f" ± {100 * math.sqrt(value * (1 - value) / one['n']):.0f}" if key in SHARES_RIGHT else ""
    return f"{value:.0%}{error}"


CURVES = {
    "share right, where a look is needed": [f"train/accuracy/tinylook/{one}" for one in Puzzle if one not in FREE],
    "looks on none": ["task/tinylook/none/needless"],
    "evidence given right, prior": ["task/tinylook/prior/faithful"],
    "share right, prior": ["train/accuracy/tinylook/prior"],
}


def draw(found: Numbers, path: Path) -> None:
    """Training curves of every run: each reward has a colour, each seed a line."""
    figure, axes = plt.subplots(1, len(CURVES), figsize=(3.1 * len(CURVES), 3.0), sharey=True)
    for axis, (title, metrics) in zip(axes, CURVES.items(), strict=True):
        for run in found.values():
            columns = [run["course"][name] for name in metrics if name in run["course"]]
            points = [
                (step, _mean([value for value in values if value is not None]))
                for step, *values in zip(run["course"]["step"], *columns, strict=True)
            ]
            known = [(step, value) for step, value in points if value is not None]
            smooth = [_mean([v for _, v in known[max(0, at - SMOOTHED + 1) : at + 1]]) for at in range(len(known))]
            colour = "C0" if run["reward"] == "tapo" else "C1"
            label = TITLES[run["reward"]] if run["seed"] == 0 else None
            axis.plot([step for step, _ in known], smooth, color=colour, lw=1.2, label=label)
        axis.set(title=title, xlabel="steps", ylim=(0, 1.02))
        axis.title.set_fontsize("small")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _episodes(runs: Path, folder: Path) -> Iterator[str]:
    """The first episode of some kinds of question after each reward's first run, with the images that were shown."""
    yield "# Episodes after RL"
    for run in [run for run in _runs(runs) if run.name.endswith("_0")]:
        played = sorted((run / "eval").glob("step_*.parquet"))
        seen: set[str] = set()
        for one in read_trajectories(played[-1]) if played else []:
            puzzle = one.sample.data_source.rpartition("/")[2]
            if puzzle not in seen:
                seen.add(puzzle)
                name = f"{run.name}_{puzzle}.png"
                _strip(run, one, folder / name)
                said = "\n".join(" ".join(answer.text.split()) for answer in one.answers)
                right = "right" if one.right else "wrong"
                asked = " ".join(one.sample.prompt[-1].text.replace("<image>", "").split())
                title = f"## {TITLES[run.name.rpartition('_')[0]]}: {asked} ({right})"
                yield f"{title}\n\n![what was shown]({name})\n\n```text\n{said}\n```"


def _strip(run: Path, trajectory: Trajectory, path: Path) -> None:
    """The images of an episode side by side: the view, then what each look showed."""
    shown = [
        Pictures.open(io.BytesIO(_content(run, part.source))).convert("RGB")
        for message in trajectory.messages
        if message.role in (Role.USER, Role.TOOL) and not isinstance(message.content, str)
        for part in message.content
        if isinstance(part, Image)
    ]
    side, gap = 64 * ENLARGED, 6
    strip = Pictures.new("RGB", (max(1, len(shown)) * (side + gap), side), "white")
    for number, picture in enumerate(shown):
        strip.paste(picture.resize((side, side), Pictures.Resampling.NEAREST), (number * (side + gap), 0))
    strip.save(path, optimize=True)


def _content(run: Path, source: str) -> bytes:
    """Of an image, which a run keeps under a name of its own."""
    return read_image(str(run / source) if source.startswith("images/") else source)


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
