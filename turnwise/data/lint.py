"""A linter for data files: what loading would refuse, and what loads but is probably not what was meant."""

import enum
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from turnwise.data.files import data_files
from turnwise.data.images.cells import ImageCells
from turnwise.data.prompts import MARKER
from turnwise.data.rows import Row, RowError, name_files, read_rows
from turnwise.data.samples import misspelt, to_sample
from turnwise.errors import DataError
from turnwise.types import Message, Role, Sample


class LintSeverity(enum.StrEnum):
    """Whether a finding makes the file unusable or only deserves a look."""

    ERROR = "error"
    """The file cannot be used, or not as it was meant."""
    WARNING = "warning"
    """It can be used; look whether it was meant so."""


class LintKind(enum.StrEnum):
    """What lint can find in a data file."""

    UNREADABLE = "unreadable file"
    REFUSED = "refused row"
    MISSPELT = "misspelt column"
    MISSING_TOOLS_KWARGS = "missing tools_kwargs"
    EMPTY_PROMPT = "empty prompt"
    EMPTY_MESSAGE = "empty message"
    NO_GROUND_TRUTH = "no ground truth"
    LAST_MESSAGE = "last message not from the user"
    UNUSED_MARKER = "image marker without images"
    NULL_COLUMN = "null column"
    DUPLICATE_INDEX = "duplicate index"
    DUPLICATE_PROMPT = "duplicate prompt"
    MIXED_INTERACTION = "mixed interaction"

    @property
    def severity(self) -> LintSeverity:
        """Errors come first in the list."""
        return LintSeverity.ERROR if self in _ERRORS else LintSeverity.WARNING


_ERRORS = (
    LintKind.UNREADABLE,
    LintKind.REFUSED,
    LintKind.MISSPELT,
    LintKind.MISSING_TOOLS_KWARGS,
    LintKind.EMPTY_PROMPT,
)


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One thing found; `row` is None when it concerns the whole file, `field` is "" when it concerns the whole row."""

    kind: LintKind
    file: str
    row: int | None
    field: str
    text: str

    @property
    def severity(self) -> LintSeverity:
        """The severity that belongs to its kind."""
        return self.kind.severity

    def __str__(self) -> str:
        where = [self.file + ("" if self.row is None else f" row {self.row}"), self.field, self.text]
        return f"{self.severity}: {': '.join(part for part in where if part)}"


@dataclass(slots=True)
class LintReport:
    """What the linter saw. `findings` holds at most `limit` examples of each kind, `counts` counts them all."""

    limit: int
    rows: int = 0
    findings: list[LintFinding] = field(default_factory=list)
    counts: Counter[LintKind] = field(default_factory=Counter)
    data_sources: Counter[str] = field(default_factory=Counter)

    @property
    def errors(self) -> int:
        """How many findings are errors."""
        return sum(count for kind, count in self.counts.items() if kind.severity is LintSeverity.ERROR)

    @property
    def warnings(self) -> int:
        """How many findings are warnings."""
        return self.counts.total() - self.errors

    def add(self, finding: LintFinding) -> None:
        """Count a finding and keep it while there is room for its kind."""
        self.counts[finding.kind] += 1
        if self.counts[finding.kind] <= self.limit:
            self.findings.append(finding)


@dataclass(slots=True)
class _FileNotes:
    """What must be remembered of a file's rows until its end."""

    name: str
    columns: set[str] = field(default_factory=set)
    filled: set[str] = field(default_factory=set)
    misspelt: set[str] = field(default_factory=set)
    indexes: dict[int | str, int] = field(default_factory=dict)
    named: int = 0
    unnamed: int = 0


def lint(
    paths: Iterable[str | Path],
    *,
    prompt_key: str,
    default_source: str | None = None,
    images_from: str | None = None,
    limit: int = 20,
) -> LintReport:
    """Read every row of every file and report what is wrong with them."""
    report = LintReport(limit)
    prompts: dict[bytes, tuple[str, int]] = {}
    for path, name in name_files(data_files(paths)).items():
        notes = _FileNotes(name)
        try:
            for row in read_rows(path, label=name):
                report.rows += 1
                read = partial(to_sample, prompt_key=prompt_key, default_source=default_source)
                read = partial(read, images=ImageCells(images_from))  # a new one: it remembers what it read
                for finding in _lint_row(row, prompt_key, read, notes, prompts, report.data_sources):
                    report.add(finding)
        except DataError as error:
            report.add(LintFinding(LintKind.UNREADABLE, name, None, "", str(error)))
        for finding in _lint_columns(notes):
            report.add(finding)
    return report


def _lint_row(
    row: Row,
    prompt_key: str,
    read: Callable[[Row], Sample],
    notes: _FileNotes,
    prompts: dict[bytes, tuple[str, int]],
    data_sources: Counter[str],
) -> Iterator[LintFinding]:
    notes.columns |= row.values.keys()
    notes.filled |= {column for column, value in row.values.items() if value is not None}
    for name, problem in misspelt(row.values, prompt_key=prompt_key):
        if name not in notes.misspelt:  # a column is misspelt once, not once a row
            notes.misspelt.add(name)
            yield LintFinding(LintKind.MISSPELT, row.name, row.number, name, problem)
    try:
        sample = read(row)
    except RowError as error:
        yield LintFinding(LintKind.REFUSED, row.name, row.number, error.field, error.problem)
        return
    data_sources[sample.data_source] += 1
    for kind, name, text in _lint_sample(sample, prompt_key):
        yield LintFinding(kind, row.name, row.number, name, text)
    for kind, name, text in _lint_among_others(sample, row, prompt_key, notes, prompts):
        yield LintFinding(kind, row.name, row.number, name, text)


def faults(sample: Sample, prompt_key: str) -> list[str]:
    """What makes a sample useless though its row could be read."""
    findings = _lint_sample(sample, prompt_key)
    return [f"{name}: {text}" for kind, name, text in findings if kind.severity is LintSeverity.ERROR]


def _lint_sample(sample: Sample, prompt_key: str) -> Iterator[tuple[LintKind, str, str]]:
    """What can be said of one sample alone."""
    empty = [f"{prompt_key}[{index}]" for index, message in enumerate(sample.prompt) if _is_empty(message)]
    if len(empty) == len(sample.prompt):
        yield LintKind.EMPTY_PROMPT, prompt_key, "no message has text or an image"
    elif empty:
        yield LintKind.EMPTY_MESSAGE, f"{empty[0]}.content", "empty"
    last = sample.prompt[-1].role
    if last not in (Role.USER, Role.TOOL):
        field_name = f"{prompt_key}[{len(sample.prompt) - 1}].role"
        yield LintKind.LAST_MESSAGE, field_name, f"the last message is the {last}'s, so there is nothing to answer"
    for mark in (MARKER, "<video>", "<audio>"):
        if not (mark == MARKER and sample.images) and any(mark in message.text for message in sample.prompt):
            yield (
                LintKind.UNUSED_MARKER,
                prompt_key,
                f"holds {mark} but the row has no {mark[1:-1]}s; it stays plain text",
            )
    truth = sample.ground_truth
    if truth is None or truth != truth or (isinstance(truth, str) and not truth.strip()):  # NaN differs from itself
        yield LintKind.NO_GROUND_TRUTH, "reward_model.ground_truth", "missing: most scorers need it"
    if sample.info.get("extra_info", {}).get("need_tools_kwargs") and not sample.tools_kwargs:
        yield LintKind.MISSING_TOOLS_KWARGS, "extra_info.tools_kwargs", "missing although need_tools_kwargs is true"


def _lint_among_others(
    sample: Sample, row: Row, prompt_key: str, notes: _FileNotes, prompts: dict[bytes, tuple[str, int]]
) -> Iterator[tuple[LintKind, str, str]]:
    """What shows only beside earlier rows and files."""
    index = sample.info.get("extra_info", {}).get("index")
    if index is not None and notes.indexes.setdefault(index, row.number) != row.number:
        yield LintKind.DUPLICATE_INDEX, "extra_info.index", f"the same as row {notes.indexes[index]}"
    digest = hashlib.blake2b(repr(sample.prompt).encode(), digest_size=16).digest()
    file, number = prompts.setdefault(digest, (row.name, row.number))
    if file != row.name:
        yield LintKind.DUPLICATE_PROMPT, prompt_key, f"the same as {file} row {number}"
    notes.named += sample.interaction is not None
    notes.unnamed += sample.interaction is None


def _lint_columns(notes: _FileNotes) -> Iterator[LintFinding]:
    for column in sorted(notes.columns - notes.filled):
        yield LintFinding(LintKind.NULL_COLUMN, notes.name, None, column, "null in every row")
    if notes.named and notes.unnamed:
        text = f"{notes.named} rows name an interaction, {notes.unnamed} do not"
        yield LintFinding(LintKind.MIXED_INTERACTION, notes.name, None, "extra_info.interaction_kwargs.name", text)


def _is_empty(message: Message) -> bool:
    says_nothing = not message.text.strip() and (isinstance(message.content, str) or not message.content)
    return says_nothing and not message.tool_calls
