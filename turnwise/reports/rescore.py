"""Scoring again what a run has recorded, without a model, and what that would have changed."""

import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from turnwise.config import Config, ScoringConfig
from turnwise.config.choices import Advantage
from turnwise.data.task import known_scorers
from turnwise.errors import ConfigError, StorageError
from turnwise.scoring.scorer import SCORING, apply
from turnwise.scoring.service import Scoring
from turnwise.storage.images.copies import recalled, with_copies
from turnwise.storage.images.reader import home_of
from turnwise.storage.run_dir import RESCORED, RunDir
from turnwise.storage.trajectories.files import read_sources, read_trajectories, write_trajectories
from turnwise.system.concurrency import each
from turnwise.system.files import cannot
from turnwise.training.advantages import GROUP_BASELINES, against_group
from turnwise.training.sequences import LEFT_OUT
from turnwise.types import Trajectory, Turn, is_right

AT_ONCE = 256
"""Trajectories under way; runners have limits of their own."""
SHOWN = 20


@dataclass(frozen=True, slots=True)
class Change:
    """One trajectory before and after. Advantages are both computed now, from the rewards alone."""

    file: str
    sample: str
    sibling: int
    reward: float | None
    new_reward: float | None
    parts: dict[str, float]
    new_parts: dict[str, float]
    advantage: float
    new_advantage: float
    failure: str | None
    """Why there is no new reward."""

    @property
    def is_same(self) -> bool:
        """The same reward and parts, to the last bit."""
        return self.reward == self.new_reward and self.parts == self.new_parts

    @property
    def is_flipped(self) -> bool:
        """What was encouraged would be discouraged, or the other way round."""
        return self.advantage * self.new_advantage < 0


@dataclass(frozen=True, slots=True)
class GroupChange:
    """One group of siblings whose rewards differed and no longer do, or now do and did not."""

    file: str
    sample: str
    rewards: list[float]
    new_rewards: list[float]

    @property
    def lost(self) -> bool:
        """It would no longer teach anything."""
        return len(set(self.rewards)) > 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run's rewards and what they would be."""

    scorer: str
    advantage: str
    """How advantages were computed: the run's own way where it compares siblings, else dr_grpo."""
    changes: list[Change]
    groups: int
    varied: list[GroupChange]
    """Groups that lost or gained variance."""

    @classmethod
    def of_nothing(cls, scorer: str, advantage: str) -> "Comparison":
        """An empty comparison, before the first file is added."""
        chosen = Advantage(advantage) if advantage in GROUP_BASELINES else Advantage.dr_grpo
        return cls(scorer, chosen.value, [], 0, [])

    def with_file(self, file: str, before: Sequence[Trajectory], after: Sequence[Trajectory]) -> "Comparison":
        """With what changes in one more file; of its trajectories only the rewards are kept."""
        groups: dict[tuple[str, int], list[int]] = {}
        for at, trajectory in enumerate(before):
            groups.setdefault((trajectory.sample.id, trajectory.step), []).append(at)
        numbers = {at: number for number, places in enumerate(groups.values()) for at in places}
        chosen = Advantage(self.advantage)
        old, new = (_advantages(trajectories, numbers, chosen) for trajectories in (before, after))
        self.changes.extend(
            Change(file, b.sample.id, b.sibling, b.reward, a.reward, b.parts, a.parts, x, y, a.failure)
            for b, a, x, y in zip(before, after, old, new, strict=True)
        )
        for (sample, _), places in groups.items():
            rewards, news = ([r for at in places if (r := side[at].reward) is not None] for side in (before, after))
            if (len(set(rewards)) > 1) != (len(set(news)) > 1):
                self.varied.append(GroupChange(file, sample, rewards, news))
        return replace(self, groups=self.groups + len(groups))

    def summary(self) -> dict[str, Any]:
        """The counts of what changed, by name."""
        scored = [c for c in self.changes if c.reward is not None and c.new_reward is not None]
        olds, news = ([value for c in scored if (value := pick(c)) is not None] for pick in _REWARDS)
        return {
            "scorer": self.scorer,
            "advantage": self.advantage,
            "trajectories": len(self.changes),
            "same": sum(change.is_same for change in self.changes),
            "same_reward": sum(change.reward == change.new_reward for change in self.changes),
            "higher": sum(new > old for old, new in zip(olds, news, strict=True)),
            "lower": sum(new < old for old, new in zip(olds, news, strict=True)),
            "newly_scored": sum(c.reward is None and c.new_reward is not None for c in self.changes),
            "no_longer_scored": sum(c.reward is not None and c.new_reward is None for c in self.changes),
            "wrong_to_right": sum(not _right(c.reward, c.parts) and _right(c.new_reward, c.new_parts) for c in scored),
            "right_to_wrong": sum(_right(c.reward, c.parts) and not _right(c.new_reward, c.new_parts) for c in scored),
            "mean_reward": sum(olds) / len(olds) if olds else None,
            "new_mean_reward": sum(news) / len(news) if news else None,
            "flipped_signs": sum(change.is_flipped for change in self.changes),
            "groups": self.groups,
            "groups_that_lose_variance": sum(group.lost for group in self.varied),
            "groups_that_gain_variance": sum(not group.lost for group in self.varied),
        }

    def as_json(self) -> dict[str, Any]:
        """Everything, reward by reward."""
        changes = [asdict(change) | {"flipped": change.is_flipped} for change in self.changes]
        return self.summary() | {"changes": changes, "varied": [asdict(g) | {"lost": g.lost} for g in self.varied]}

    def tables(self) -> list[Table]:
        """The counts, and the largest changes."""
        counts = Table(title=f"scored again with {self.scorer}", show_header=False)
        for name, value in self.summary().items():
            text = "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
            counts.add_row("same reward and parts" if name == "same" else name.replace("_", " "), text)
        changed = [change for change in self.changes if change.reward != change.new_reward]
        if not changed:
            return [counts]
        title = f"{len(changed)} rewards change" + (f"; the largest {SHOWN}" if len(changed) > SHOWN else "")
        rows = Table(title=title, box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for column in ("file", "sample", "#", "reward", "advantage", "sign"):
            rows.add_column(column, overflow="fold", justify="left" if column in ("file", "sample") else "right")
        for change in sorted(changed, key=_size, reverse=True)[:SHOWN]:
            reward = _number(change.new_reward) if change.failure is None else change.failure
            rows.add_row(
                _short_file(change.file), change.sample, str(change.sibling), f"{_number(change.reward)} -> {reward}",
                f"{change.advantage:+.2f} -> {change.new_advantage:+.2f}", "flipped" if change.is_flipped else "",
            )  # fmt: skip
        return [counts, rows]


_REWARDS: tuple[Callable[[Change], float | None], ...] = (lambda c: c.reward, lambda c: c.new_reward)


def _right(reward: float | None, parts: dict[str, float]) -> bool:
    return reward is not None and is_right(reward, parts)


def _size(change: Change) -> float:
    if change.reward is None or change.new_reward is None:
        return float("inf")
    return abs(change.new_reward - change.reward)


def _short_file(name: str) -> str:
    """`step 12` for trajectories/step_000012.parquet, `eval 12` and `eval greedy 12` for evaluations."""
    folder, _, file = name.removesuffix(".parquet").rpartition("/")
    kind, _, step = file.rpartition("step_")
    words = ["eval" if folder == "eval" else "step", kind.strip("_"), step.lstrip("0") or "0"]
    return " ".join(filter(None, words)) if step.isdigit() else name


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


# --- scoring ------------------------------------------------------------------------------------------------------


async def rescore(trajectories: Sequence[Trajectory], scoring: Scoring) -> list[Trajectory]:
    """Copies with new rewards, parts, remarks and turn scores; episodes that failed stay without.

    One whose scoring had failed is tried again. What is given is not changed; advantages are left out, since they
    belong to the old rewards.
    """
    copies = [_unscored(trajectory) for trajectory in trajectories]
    await each(lambda copy: apply(scoring.scorers[copy.sample.data_source], copy), copies, AT_ONCE)
    return copies


def _unscored(trajectory: Trajectory) -> Trajectory:
    turns = _without_scores(trajectory.turns)
    branches = [replace(branch, turns=_without_scores(branch.turns)) for branch in trajectory.branches]
    had_failed = trajectory.failure is not None and trajectory.failure.startswith(f"{SCORING}:")
    failure = None if had_failed else trajectory.failure
    return replace(
        trajectory, turns=turns, branches=branches, reward=None, parts={}, remarks=[], advantage=None, failure=failure
    )


def _without_scores(turns: Sequence[Turn]) -> list[Turn]:
    return [replace(turn, scores={}) for turn in turns]


def _as_recorded(old: Trajectory, new: Trajectory) -> Trajectory:
    """The new scores with the words and images of the old record."""
    for then, now in zip(old.every_turn, new.every_turn, strict=True):
        now.replies = then.replies
    branches = [replace(now, messages=then.messages) for then, now in zip(old.branches, new.branches, strict=True)]
    return replace(new, sample=old.sample, messages=old.messages, branches=branches)


def compare(
    files: Mapping[str, tuple[Sequence[Trajectory], Sequence[Trajectory]]], scorer: str, advantage: str
) -> Comparison:
    """What changes: `files` has (before, after) by name, in the same order.

    The siblings of a group are the trajectories of one file with the same sample and step.
    """
    comparison = Comparison.of_nothing(scorer, advantage)
    for file, (before, after) in files.items():
        comparison = comparison.with_file(file, before, after)
    return comparison


def _advantages(trajectories: Sequence[Trajectory], groups: Mapping[int, int], advantage: Advantage) -> list[float]:
    rewards = [0.0 if t.reward is None else t.reward for t in trajectories]
    chosen = [LEFT_OUT if t.reward is None else groups[at] for at, t in enumerate(trajectories)]
    return against_group(advantage, rewards, chosen)


# --- a run on disk ------------------------------------------------------------------------------------------------


def recorded_files(run: RunDir) -> list[Path]:
    """The trajectory files of a run: its training steps, then its evaluations."""
    files = [*sorted(run.path.glob("trajectories/*.parquet")), *sorted(run.path.glob("eval/*.parquet"))]
    if not files:
        raise StorageError(f"{run.path} holds no trajectories")
    return files


def with_scorer(recorded: ScoringConfig, requested: ScoringConfig, scorer: str | None) -> ScoringConfig:
    """What to score with: `requested`, and this scorer for all when one is named. Then the recorded scorers, their
    options and their weights are not meant any more; what was asked for now is."""
    if scorer is None:
        return requested
    options = {name: settings for name, settings in requested.options.items() if name == scorer}
    stray = [
        name for name in requested.options if name != scorer and requested.options[name] != recorded.options.get(name)
    ]
    if stray:
        raise ConfigError(f"scoring.options.{stray[0]}: every trajectory is scored with {scorer}")
    weights = requested.weights if requested.weights != recorded.weights else {}
    return replace(requested, scorers={"default": scorer}, options=options, weights=weights)


async def rescore_run(run: RunDir, config: Config, name: str) -> Comparison:
    """Score a run again as this config says; trajectories and report go to a new folder `rescored/NAME` in it."""
    folder = run.path / RESCORED / name
    if folder.exists():
        raise StorageError(f"{folder} exists; nothing recorded is overwritten: choose another name")
    files, home = recorded_files(run), RunDir(home_of(run.path))
    sources = sorted({source for path in files for source in read_sources(path)})
    scoring = Scoring.of(config.scoring, sources, task_scorers=known_scorers())
    scorers = sorted({getattr(scorer, "__qualname__", "?") for scorer in scoring.scorers.values()})
    comparison = Comparison.of_nothing(", ".join(scorers), config.algorithm.advantage)
    unfinished = f"{RESCORED}/.{name}.{secrets.token_hex(4)}.tmp"
    try:
        async with scoring.running():
            for path in files:  # one after the other: a long run does not fit into memory
                file = path.relative_to(run.path).as_posix()
                before = read_trajectories(path, unread=True)
                restored = with_copies(home, before)
                with recalled(home, restored):
                    scored = await rescore(restored, scoring)
                after = [_as_recorded(old, new) for old, new in zip(before, scored, strict=True)]
                comparison = comparison.with_file(file, before, after)
                write_trajectories(run.file(f"{unfinished}/{file}"), after)
        run.write_json(f"{unfinished}/comparison.json", comparison.as_json())
        os.rename(run.path / unfinished, folder)
    except OSError as error:
        raise cannot("write", folder, error) from error
    finally:  # all of it or nothing
        shutil.rmtree(run.path / unfinished, ignore_errors=True)
    return comparison
