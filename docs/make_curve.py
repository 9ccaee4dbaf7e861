"""Draws docs/images/learning-curve.png from the metrics of training runs of one config: `make_curve.py RUN...`."""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CURVES = {
    "val/accuracy": "held-out, sampled",
    "val/greedy_accuracy": "held-out, greedy",
    "critic/score/mean": "training reward",
}


def read(run: Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images" / "learning-curve.png")
    args = parser.parse_args()
    figure, axes = plt.subplots(figsize=(7.2, 3.2), dpi=120)
    for colour, (name, label) in zip(("tab:blue", "tab:green", "tab:gray"), CURVES.items(), strict=True):
        for number, run in enumerate(args.runs):
            marker = "" if name.startswith("critic") else "o"
            line = (
                "none" if "greedy" in name else "-"
            )  # measured before and after only: a line would say what nobody saw
            axes.plot(
                *read(run, name), linestyle=line, color=colour, marker=marker, lw=1.2, label=None if number else label
            )
    axes.set(xlabel="GRPO steps", ylabel="share right", ylim=(0, 1.02))
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(args.out)


if __name__ == "__main__":
    main()
