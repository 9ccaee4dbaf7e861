"""What a person sees while training runs: a bar with the time left, and a line of numbers for every step."""

from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from turnwise.trainer.run import TrainRun

SHOWN = {
    "critic/score/mean": "reward",
    "actor/entropy": "entropy",
    "actor/ppo_kl": "kl",
    "actor/grad_norm": "grad",
    "num_turns/mean": "turns",
    "timing_s/gen": "collect s",
    "timing_s/update_actor": "learn s",
}


FORECAST_AFTER = 4
"""Steps of this process; before that the time of a step says little."""


class Display:
    """The live display of a run; without a terminal only the lines are printed."""

    def __init__(self, run: TrainRun) -> None:
        self._run = run
        self._seconds: list[float] = []
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(), console=run.console,
        )  # fmt: skip
        self._task = self._bar.add_task("training", total=run.config.training.steps)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, metrics: dict[str, float]) -> None:
        """Show a finished step, and after a few how long the rest will take."""
        numbers = ", ".join(f"{label} {metrics[name]:.3g}" for name, label in SHOWN.items() if name in metrics)
        step, steps = self._run.progress.step, self._run.config.training.steps
        self._run.note(f"step {step}/{steps}: {numbers}")
        self._seconds.append(metrics["timing_s/step"])
        if len(self._seconds) == FORECAST_AFTER and step < steps:
            later = self._seconds[1:]  # the first one also fills what is collected ahead
            minutes, rest = sum(later) / len(later) * (steps - step) / 60, steps - step
            self._run.note(f"forecast: about {minutes:.1f} minutes for the other {rest} steps, evaluations apart")
        self._bar.update(self._task, completed=step)
