"""What a person sees of a run: the last steps above a bar, in a notebook with curves; elsewhere one line a step."""

from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from turnwise.storage.run_dir import RunDir
from turnwise.storage.status import State
from turnwise.storage.trackers.notebook import NotebookPicture, curves, in_notebook
from turnwise.storage.trackers.tracker import Point

SHOWN = {
    "critic/score/mean": "reward",
    "val/accuracy": "accuracy",
    "actor/entropy": "entropy",
    "actor/ppo_kl": "kl",
    "actor/grad_norm": "grad",
    "num_turns/mean": "turns",
    "perf/throughput": "tokens/s",
    "timing_s/step": "seconds",
    "timing_s/gen": "collect s",
    "timing_s/update_actor": "learn s",
    "gpu/idle_share": "GPU idle",
}
"""Metrics and their labels; a narrow terminal shows the first ones."""
CURVES = {"critic/score/mean": "reward", "val/accuracy": "accuracy"}
"""Metrics that a notebook shows as curves."""
ROWS = 12
"""Steps in the table."""
STEP_SECONDS = "timing_s/step"
"""A point with this metric is a finished step; others are evaluations, which the run tells in its own words."""
FORECAST_AFTER = 4
"""Steps of this process; before that the time of a step says little."""
_COLUMN = 10


class ConsoleTracker:
    """The live display of a run. All lines go to log.txt too."""

    name = "console"

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps
        self._rows: dict[int, dict[str, float]] = {}
        self._seconds: list[float] = []
        self._curves: dict[str, list[tuple[int, float]]] = {label: [] for label in CURVES.values()}
        self._live: Live | None = None
        self._notebook = NotebookPicture() if in_notebook(console) else None
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(), console=console, speed_estimate_period=3600,
        )  # fmt: skip

    def start(self, run: RunDir, config: dict[str, Any], *, resumed_at: int) -> str | None:
        """Show the bar; on a terminal it and the table stay at the bottom, and everything else is printed above."""
        self._run = run
        self._task = self._bar.add_task("training", total=self._steps, completed=resumed_at)
        if self._notebook is not None:
            self._notebook.show(self._picture())
        elif self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(self._picture(), console=self._console, refresh_per_second=4)
            self._live.start()
        return None

    def log(self, point: Point) -> None:
        """Show a point: a finished step is a row and a line, an evaluation fills a column of its step's row."""
        shown_metrics = {name: point.metrics[name] for name in SHOWN if name in point.metrics}
        if shown_metrics:
            self._rows[point.step] = self._rows.get(point.step, {}) | shown_metrics
            for step in sorted(self._rows)[:-ROWS]:
                del self._rows[step]
        if STEP_SECONDS in point.metrics:
            numbers = ", ".join(f"{SHOWN[name]} {_number(name, value)}" for name, value in shown_metrics.items())
            self._note(f"step {point.step}/{self._steps}: {numbers}", printed=not self._draws)
            self._forecast(point)
            self._bar.update(self._task, completed=point.step)
        for name, label in CURVES.items():
            if name in point.metrics:
                self._curves[label].append((point.step, point.metrics[name]))
        if self._live is not None:
            self._live.update(self._picture())
        if self._notebook is not None:
            self._notebook.show(self._picture(), curves(self._curves))

    @property
    def _draws(self) -> bool:
        """Whether a picture shows the steps, so that no lines need to."""
        return self._live is not None or self._notebook is not None

    def finish(self, state: State, reason: str) -> None:
        """Leave the last picture standing."""
        if self._live is not None:
            self._live.stop()

    def _forecast(self, point: Point) -> None:
        self._seconds.append(point.metrics[STEP_SECONDS])
        rest = self._steps - point.step
        if len(self._seconds) == FORECAST_AFTER and rest > 0:
            later = self._seconds[1:]  # the first one also fills what is collected ahead
            minutes = sum(later) / len(later) * rest / 60
            self._note(f"forecast: about {minutes:.1f} minutes for the remaining {rest} steps, without evaluations")

    def _note(self, text: str, *, printed: bool = True) -> None:
        self._run.log(text)
        if printed:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _picture(self) -> Group:
        """A new table each time: the display's own thread may still be drawing the one before."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        names = [name for name in SHOWN if any(name in row for row in self._rows.values())]
        names = names[: max(1, self._console.width // _COLUMN - 1)]
        for label in ("step", *(SHOWN[name] for name in names)):
            table.add_column(label, justify="right", no_wrap=True, min_width=_COLUMN - 2)
        for step, row in sorted(self._rows.items()):
            table.add_row(str(step), *(_number(name, row[name]) if name in row else "" for name in names))
        return Group(table, self._bar) if self._rows else Group(self._bar)


def _number(name: str, value: float) -> str:
    if name in ("val/accuracy", "gpu/idle_share"):
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
