"""Pairs of episodes, the better first: of rows with two answers, or the best and the worst of a recorded group."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnwise.config import Config
from turnwise.config.sections import section
from turnwise.data.files import Split, data_files
from turnwise.data.images.cells import ImageCells
from turnwise.data.rows import Row, name_files, read_rows
from turnwise.data.values import FieldError
from turnwise.errors import DataError
from turnwise.ext.conversations.config import ConversationsConfig
from turnwise.ext.conversations.demonstrations import RowReader
from turnwise.ext.conversations.layouts import layout_of
from turnwise.ext.dpo.config import DpoConfig
from turnwise.system.stopping import run_stoppable
from turnwise.training.demonstrations import Demonstrations, read_demonstrations
from turnwise.training.endpoint_episodes import Student
from turnwise.types import Trajectory

CHOSEN, REJECTED = 0, 1
"""The siblings of a pair."""
Note = Callable[[str], None]


def of_files(config: Config, student: Student, note: Note) -> Demonstrations:
    """The pairs in the rows of `dpo.files`; those that cannot be learned are counted by reason."""
    settings = section(config, ConversationsConfig)
    reader = RowReader(config, settings, student, note, ImageCells(config.data.images_from))
    files = name_files(data_files(section(config, DpoConfig).files, Split.TRAIN))
    run_stoppable(_read(reader, files))
    pairs = reader.demonstrations("paired")
    return replace(pairs, read=2 * pairs.read, dropped={reason: 2 * count for reason, count in pairs.dropped.items()})


async def _read(reader: RowReader, files: Mapping[Path, str]) -> None:
    offered = reader.offered()
    for path, label in files.items():
        before, used = reader.rows, len(reader.used)
        for row in read_rows(path, label=label):
            reader.rows += 1
            try:
                sides = [replace(row, values=values) for values in _sides(row)]
                chosen, rejected = [
                    await reader.trajectory(side, layout_of(side.values, side.name), offered) for side in sides
                ]
                if chosen.segments[-1].token_ids.tolist() == rejected.segments[-1].token_ids.tolist():
                    raise DataError("chosen and rejected are the same")
            except (FieldError, DataError) as error:
                reader.refuse(error, row)
            else:
                reader.used += [replace(chosen, reward=1.0), replace(rejected, sibling=REJECTED, reward=0.0)]
        count = (len(reader.used) - used) // 2
        reader.note(f"{label}: {reader.rows - before} rows, {count} of them used; read as pairs")


def _sides(row: Row) -> Iterator[dict[str, Any]]:
    """The columns of either conversation."""
    for name in ("chosen", "rejected"):
        if row.values.get(name) in (None, "", []):
            raise FieldError(name, "missing")
        rest = {key: value for key, value in row.values.items() if key not in ("chosen", "rejected", "prompt")}
        if row.values.get("prompt") in (None, "", []):
            yield {**rest, "messages": row.values[name]}
        else:
            yield {**rest, "prompt": row.values["prompt"], "completion": row.values[name]}


def of_recorded(config: Config, student: Student, note: Note) -> Demonstrations:
    """The best and the worst episode of every group of `dpo.recorded`, where their rewards differ by more than
    `dpo.margin`."""
    settings = section(config, DpoConfig)
    # Every reward is welcome; episodes without one are left out.
    asked = replace(config.sft, recorded=settings.recorded, min_reward=-math.inf)
    read_in = read_demonstrations(replace(config, sft=asked), student, note)
    groups: dict[tuple[str, int], list[Trajectory]] = {}
    for trajectory in read_in.used:
        groups.setdefault((trajectory.sample.id, trajectory.step), []).append(trajectory)
    pairs = [pair for group in groups.values() if (pair := _best_and_worst(group, settings.margin)) is not None]
    used = [trajectory for pair in pairs for trajectory in pair]
    left_out = len(read_in.used) - len(used)
    dropped = read_in.dropped | ({"neither best nor worst of a group by reward": left_out} if left_out else {})
    if not pairs:
        raise DataError(
            f"no pair in {len(groups)} groups of {len(read_in.used)} episodes: in none do rewards differ by more than "
            f"{settings.margin:g} (dpo.margin); evaluate with eval.group_size, or use a training run"
        )
    note(f"{len(pairs)} pairs of {len(groups)} groups")
    return Demonstrations(used, read_in.read, dropped, "paired")


def _best_and_worst(group: Sequence[Trajectory], margin: float) -> tuple[Trajectory, Trajectory] | None:
    best, worst = max(group, key=_reward), min(group, key=_reward)
    if not _reward(best) - _reward(worst) > margin:
        return None
    return replace(best, sibling=CHOSEN), replace(worst, sibling=REJECTED)


def _reward(trajectory: Trajectory) -> float:
    return math.nan if trajectory.reward is None else trajectory.reward
