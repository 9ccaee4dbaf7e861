"""What a training run came to: its reward, accuracy before and after, what to look at and what to do next."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from turnwise.config.training import GREEDY
from turnwise.reports.data_sources import CAPTION
from turnwise.reports.evaluation import Printable, is_detail, is_measure, shown
from turnwise.reports.pass_at_k import REPEATED
from turnwise.storage.final_policy import Shipped, read_shipped
from turnwise.storage.run_dir import METRICS, RunDir
from turnwise.storage.transcript import visible
from turnwise.training.runs.resume_config import resume_command
from turnwise.training.runs.train_run import TrainRun

LAST_STEPS = 5
"""The end of training is the mean over so many steps: one step's reward is noise."""


@dataclass(frozen=True, slots=True)
class StepReward:
    """What a step says of its reward: the mean, and whether there was anything to learn from it."""

    step: int
    reward: float | None
    """None when nothing of the step could be trained on."""
    has_signal: bool


@dataclass(frozen=True, slots=True, repr=False)
class TrainReport(Printable):
    """A training run: what ended it, its reward, and accuracy on held-out samples before and after."""

    run: Path
    reason: str
    steps: int
    seconds: float
    tokens: int
    """Written by the policy in training."""
    before: dict[str, float]
    """`accuracy`, `accuracy_stderr`, `accuracy_n`, the same by data source (`accuracy/SOURCE`), what tasks measure
    (`task/SOURCE/NAME`), and all of it greedily (`greedy_accuracy`)."""
    after: dict[str, float]
    rewards: list[StepReward]
    resume: str
    """The command that resumes the run."""
    shipped: Shipped | None = None
    """Which weights `RUN/policy` has, and their evaluation; `after` is that of the last ones. None before the end."""

    @property
    def accuracy(self) -> float | None:
        """Of what is shipped, as sampled; None when the run was stopped before it was measured."""
        return self.after.get("accuracy") if self.shipped is None else self.shipped.policy.accuracy

    @property
    def warnings(self) -> list[str]:
        """What a person should look at before believing the numbers."""
        idle = sum(not step.has_signal for step in self.rewards)
        if not idle:
            return []
        reasons = "equal rewards, no gradient or no usable episode"
        problem = f"{idle} of {len(self.rewards)} steps had no learning signal: {reasons}"
        return [f"{problem} (`turnwise show {self.run}` shows an episode)" if idle == len(self.rewards) else problem]

    def as_json(self) -> dict[str, Any]:
        """The report as values that JSON can hold."""
        changed = {"run": str(self.run), "seconds": round(self.seconds, 3), "warnings": self.warnings}
        return asdict(self) | changed

    def arrow(self) -> Any:
        """An Arrow table with a row for each step and evaluation; `turnwise.read(report.run)` has the episodes."""
        from turnwise.storage.recorded_run import steps_table

        return steps_table(RunDir(self.run))

    def frame(self) -> Any:
        """`arrow` as a pandas DataFrame."""
        from turnwise.storage.recorded_run import to_pandas

        return to_pandas(self.arrow())

    def table(self) -> Table:
        """Before and after, one row per measurement; the reward over the steps below."""
        table = Table(title=self._title(), caption=CAPTION)
        sides = {"before": self.before, "after": self.after}
        if self.shipped is not None and not self.shipped.is_last:
            last, policy = self.shipped.last, self.shipped.policy
            sides = {"before": self.before, f"shipped: step {policy.step}": policy.found}
            sides[f"last: step {last.step}"] = last.found
        for column in ("held-out samples", *sides):
            table.add_column(column, justify="left" if column[0] == "h" else "right", overflow="fold")
        every = dict.fromkeys((*self.before, *self.after))
        names = [name for name in every if not (is_detail(name) or is_measure(name))]
        names.sort(key=lambda name: (name.startswith(GREEDY), name.removeprefix(GREEDY).startswith(REPEATED)))
        sources = {name.partition("/")[2] for name in names if "/" in name}
        for name in names:
            kind, slash, _ = name.partition("/")
            again = slash and len(sources) == 1 and kind in names  # the whole says the same as its one data source
            if not again and not self._says_the_same(name, name.replace("first_", "", 1)):
                table.add_row(Text(in_words(name, len(sources) > 1)), *(shown(side, name) for side in sides.values()))
        return table

    def _says_the_same(self, name: str, other: str) -> bool:
        """Whether a first answer was every answer, so that its line would stand there twice."""
        return name != other and all(side.get(name) == side.get(other) for side in (self.before, self.after))

    def __rich__(self) -> RenderableType:
        lines = [*_reward_lines(self.rewards), f"tokens: {self.tokens:,} written by the policy"]
        lines += [f"warning: {text}" for text in self.warnings]
        root = max(self.run.glob("checkpoints/step_*"), default=None) if self.shipped is None else self.run
        if root is not None:
            folders = {"policy": root / "policy", "LoRA adapter": root / "policy_adapter"}
            lines += [f"{name}: {folder}" for name, folder in folders.items() if folder.is_dir()]
        lines += [] if self.shipped is None else [f"{self.shipped} (training.ship)"]
        lines += [f"run directory: {self.run}"]
        lines += [f"curves and episodes: turnwise board {self.run}", f"one episode: turnwise show {self.run}"]
        lines += [f"train longer: {self._longer()}" if self.after else f"resume with: {self.resume}"]
        heading = self.table() if self.before else Text(self._title() + "; nothing was evaluated yet")
        return Group(heading, *(Text(visible(line)) for line in lines))

    def _title(self) -> str:
        return f"training, {self.steps} steps, {self.seconds:.0f} s: {self.reason}"

    def _longer(self) -> str:
        steps, in_python = f"training.steps={2 * self.steps}", '"resume=auto")'
        if in_python in self.resume:
            return self.resume.replace(in_python, f'"resume=auto", "{steps}")')
        return f"{self.resume} {steps}"


def train_report(run: TrainRun) -> TrainReport:
    """What came of a run so far: why it ended, how long it took, and how accuracy and reward changed."""
    progress = run.progress
    return TrainReport(
        run=run.dir.path,
        reason=run.status.reason,
        steps=progress.step,
        seconds=run.seconds(),
        tokens=progress.tokens,
        before=progress.before or {},
        after=progress.after or {},
        rewards=step_rewards(run.dir.path),
        resume=resume_command(run.dir.name, run.config),
        shipped=read_shipped(run.dir.path) if progress.after is not None else None,
    )


def step_rewards(run: Path) -> list[StepReward]:
    """The reward of every step that a run's metrics.jsonl has."""
    lines = RunDir(run).read_jsonl(METRICS) if (run / METRICS).is_file() else []
    return [
        StepReward(line["step"], line.get("critic/score/mean"), has_signal(line))
        for line in lines
        if "groups/total" in line
    ]


def has_signal(line: Mapping[str, float | None]) -> bool:
    """Whether a training step's metrics show anything to learn from: rewards that differ where they are compared.

    Entropy and KL terms move weights without any, so the gradient alone does not tell.
    """
    most, least = line.get("critic/score/max"), line.get("critic/score/min")
    if most is None or line.get("actor/grad_norm") == 0.0:
        return False
    if line.get("turn_credit/scored_turns"):
        return True
    flat = line.get("critic/advantages/max") == line.get("critic/advantages/min") == 0.0
    return most != least and not flat


def in_words(name: str, with_source: bool) -> str:
    """A measurement as a person reads it: `greedy_accuracy/gsm8k` is "gsm8k: accuracy, greedy"."""
    kind, _, source = name.partition("/")
    base = kind.removeprefix(GREEDY)
    words = {"first_accuracy": "accuracy of first answers"}.get(base, base) + (", greedy" if base != kind else "")
    return f"{source}: {words}" if source and with_source else words


def _reward_lines(rewards: Sequence[StepReward]) -> list[str]:
    points = [(point.step, point.reward) for point in rewards if point.reward is not None]
    if not points:
        return ["reward: none, no step was trained on"]
    last = points[-LAST_STEPS:]
    best_step, best = max(points, key=lambda point: point[1])
    mean = sum(reward for _, reward in last) / len(last)
    return [
        f"reward: {points[0][1]:.3f} at step {points[0][0]}, {mean:.3f} in the last {len(last)} steps, "
        f"best {best:.3f} at step {best_step}"
    ]
