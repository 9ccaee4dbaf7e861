"""Files of conversations as demonstrations: every row is rendered as the student would write it, or refused by name."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from turnwise.config import Config
from turnwise.config.sections import section
from turnwise.data.files import Split, data_files
from turnwise.data.images.cells import ImageCells
from turnwise.data.rows import Row, name_files, read_rows
from turnwise.data.values import FieldError, shorten
from turnwise.errors import DataError, PluginError
from turnwise.ext.conversations.config import ConversationsConfig, RowTools
from turnwise.ext.conversations.layouts import RowLayout, layout_of
from turnwise.ext.conversations.rows import ConversationRow, read_row
from turnwise.rollout.imitation import Dialogue, imitate
from turnwise.rollout.toolbox.files import load_tools
from turnwise.rollout.toolbox.schema import ArgumentChecker, BadArguments
from turnwise.rollout.toolbox.toolbox import Toolbox
from turnwise.system.stopping import run_stoppable
from turnwise.training.demonstrations import Demonstrations, without_turns
from turnwise.training.endpoint_episodes import Student
from turnwise.types import CallRecord, CallStatus, JsonSchema, Role, Sample, Trajectory

SOURCE = "conversations"
"""The data source of the samples."""
_LONGEST = 160
_PLACES = re.compile(r"\[\d+\]")


def read_conversations(config: Config, student: Student, note: Callable[[str], None]) -> Demonstrations:
    """Every row of `conversations.files`; those that cannot be learned are counted by reason."""
    files = name_files(data_files(section(config, ConversationsConfig).files, Split.TRAIN))
    return _read(files, config, student, note)


def read_held_out(config: Config, student: Student, note: Callable[[str], None]) -> Demonstrations:
    """Every row of `conversations.eval_files` in the same way."""
    files = name_files(data_files(section(config, ConversationsConfig).eval_files, Split.EVAL))
    return _read(files, config, student, note)


def _read(files: dict[Path, str], config: Config, student: Student, note: Callable[[str], None]) -> Demonstrations:
    settings = section(config, ConversationsConfig)
    reader = RowReader(config, settings, student, note, ImageCells(config.data.images_from))
    run_stoppable(reader.read(files))
    return reader.demonstrations("imported")


@dataclass(slots=True)
class RowReader:
    """Makes an episode of each row, and counts those that cannot be one."""

    config: Config
    settings: ConversationsConfig
    student: Student
    note: Callable[[str], None]
    images: ImageCells
    used: list[Trajectory] = field(default_factory=list)
    rows: int = 0
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    """How many rows by reason, and the place of the first."""
    unread: set[str] = field(default_factory=set)
    _checkers: dict[str, ArgumentChecker] = field(default_factory=dict)

    async def read(self, files: dict[Path, str]) -> None:
        offered = self.offered()
        for path, label in files.items():
            layout: RowLayout | None = None
            before, used = self.rows, len(self.used)
            for row in read_rows(path, label=label):
                layout = layout or layout_of(row.values, row.name)
                self.rows += 1
                try:
                    self.used.append(await self.trajectory(row, layout, offered))
                except (FieldError, DataError) as error:
                    self.refuse(error, row)
            name = "" if layout is None else layout.name
            self.note(f"{label}: {self.rows - before} rows, {len(self.used) - used} of them used; read as {name}")

    def demonstrations(self, origin: str) -> Demonstrations:
        """All that was read; DataError when nothing of it can be learned."""
        dropped = {f"{reason} (first: {first})": count for reason, (count, first) in self.refused.items()}
        if not self.used:
            why = "; ".join(f"{count} {reason}" for reason, count in dropped.items())
            raise DataError(f"none of {self.rows} conversations is left to learn from: {why}")
        if self.unread:
            self.note(f"not read: {', '.join(sorted(self.unread))}")
        return Demonstrations(self.used, self.rows, dropped, origin)

    def offered(self) -> list[JsonSchema]:
        """The tools of rows that name none."""
        config = self.config
        if self.settings.tools is not RowTools.rollout:
            return []
        tools = [each for spec in config.rollout.tools for each in load_tools(spec, config)]
        toolbox = Toolbox(tools, config.rollout, config)
        return toolbox.schemas(toolbox.common)

    def refuse(self, error: FieldError | DataError, row: Row) -> None:
        """Count the row as left out, by its reason."""
        text = _PLACES.sub("[]", str(error)) if isinstance(error, FieldError) else str(error)
        reason = shorten(text, _LONGEST)
        count, first = self.refused.get(reason, (0, f"{row.name} row {row.number}"))
        self.refused[reason] = count + 1, first

    async def trajectory(self, row: Row, layout: RowLayout, offered: list[JsonSchema]) -> Trajectory:
        """The row as an episode of the student's; FieldError or DataError for one that cannot be."""
        talk = read_row(row.values, layout, self.images.of_row(row.file, None))
        self.unread |= talk.unread
        tools = offered if talk.tools is None else talk.tools
        prompt = tuple(talk.messages[: talk.context])
        images = tuple(image for message in prompt for image in message.images)
        info = {"tools": talk.tools} if talk.tools else {}
        sample = Sample(f"{row.name}:{row.number}", prompt, SOURCE, images=images, info=info)
        dialogue = Dialogue(sample, talk.messages[talk.context :], tools)
        trajectory = await imitate(dialogue, self.student.renderer, self.student.context_length)
        if self.settings.leave_out_failed_calls:
            self._judge(trajectory, talk, tools)
        places = [number for number, message in enumerate(talk.messages) if message.role is Role.ASSISTANT]
        answers = [number for number in places if number >= talk.context]
        return without_turns(trajectory, {answers.index(place) for place in talk.unlearned if place in answers})

    def _judge(self, trajectory: Trajectory, talk: ConversationRow, tools: Sequence[JsonSchema]) -> None:
        """Say of every call whether it is known to have failed."""
        errors = {trajectory.messages[number].tool_call_id for number in talk.failed}
        schemas = {schema["function"]["name"]: schema for schema in tools}
        for turn in trajectory.turns:
            turn.calls = [self._judged(record, schemas, errors) for record in turn.calls]

    def _judged(self, record: CallRecord, schemas: dict[str, JsonSchema], errors: set[str | None]) -> CallRecord:
        name = record.call.name
        if record.status.failed:
            return record
        if schemas and name not in schemas:
            return replace(record, status=CallStatus.UNKNOWN_TOOL)
        if record.call.id in errors:
            return replace(record, status=CallStatus.ERROR)
        if name in schemas:
            key = json.dumps(schemas[name], sort_keys=True)
            try:
                if key not in self._checkers:
                    self._checkers[key] = ArgumentChecker.of(schemas[name], name)
                self._checkers[key].check_now(record.call.arguments)
            except BadArguments:
                return replace(record, status=CallStatus.BAD_ARGUMENTS)
            except PluginError as error:
                raise DataError(f"tools: {error}") from error
        return record
