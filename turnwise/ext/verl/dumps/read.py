"""Rollout dumps of other systems as a run directory: surveyed first, then written step by step.

Files are never read whole. The survey checks every line and remembers only where each step's lines are, so that a bad
line is known before anything is written; then one step at a time is in memory.
"""

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import yaml

from turnwise.errors import ConfigError, DataError
from turnwise.ext.verl.dumps.dialogue import Markers
from turnwise.ext.verl.dumps.metrics import eval_metrics, step_metrics
from turnwise.ext.verl.dumps.rows import DumpFormat, DumpRow, read_row
from turnwise.ext.verl.dumps.trajectories import Translator, sample_id
from turnwise.storage.images.copies import Album
from turnwise.storage.index import record
from turnwise.storage.run_dir import CONFIG, METRICS, PLAN, RunDir
from turnwise.storage.status import StatusWriter
from turnwise.storage.token_texts import TOKENS
from turnwise.system.files import cannot
from turnwise.types import Trajectory

COMMAND = "import-jsonl"
LONGEST_LINE = 256 << 20
_STEP_NAME = re.compile(r"(\d{1,9})\.jsonl")
_EVAL_NAME = re.compile(r"rollout_data_rank_?val.*\.jsonl")
_GZIP = b"\x1f\x8b"

Progress = Callable[[int, int], None]
"""Told how many bytes are done, of how many."""


@dataclass(frozen=True, slots=True)
class DumpFile:
    """One file of a dump; `evaluation` when all of it is."""

    path: Path
    evaluation: bool

    @property
    def step(self) -> int | None:
        """The step in a name such as `12.jsonl`."""
        named = _STEP_NAME.fullmatch(self.path.name)
        return int(named[1]) if named else None


@dataclass(slots=True)
class Survey:
    """Where the good lines of every step are, and what is wrong with the others."""

    sources: list[DumpFile]
    places: dict[tuple[bool, int], "array[int]"] = field(default_factory=lambda: defaultdict(lambda: array("Q")))
    """(evaluation, step) -> file number, byte offset and line number of each line, one after the other."""
    formats: Counter[DumpFormat] = field(default_factory=Counter)
    bad: int = 0
    first_bad: str = ""

    @property
    def lines(self) -> int:
        """How many good lines there are."""
        return sum(self.formats.values())


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import of dumps read and wrote, in numbers."""

    run: Path
    files: int
    lines: int
    bad: int
    first_bad: str
    train_steps: int
    eval_steps: int
    groups: int
    markers: dict[Markers, int]
    notes: dict[str, int]


def import_dumps(
    paths: Sequence[Path],
    out: Path,
    *,
    evaluations: Sequence[Path] = (),
    form: DumpFormat = DumpFormat.AUTO,
    images: Path | None = None,
    skip_bad: bool = False,
    progress: Progress = lambda done, total: None,
) -> Imported:
    """Make the run directory `out` of dump files or folders of them; `evaluations` become the run's evaluations.

    Images that rows name are copied only from inside the folder `images`: a dump is somebody else's word.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"--out {out} exists; nothing is overwritten")
    if images is not None and not images.is_dir():
        raise ConfigError(f"--images {images} is not a folder")
    sources = find_sources(paths, evaluations)
    sizes = [source.path.stat().st_size for source in sources]
    survey = _survey(sources, form, skip_bad, lambda done: progress(done, 2 * sum(sizes)))
    run = RunDir.create(out.parent, out.name, COMMAND)
    run.write_text(CONFIG, _config(survey, form))
    with StatusWriter(run, COMMAND, steps=max((step for _, step in survey.places), default=None)) as status:
        return _write(run, survey, form, images, status, lambda done: progress(sum(sizes) + done, 2 * sum(sizes)))


def find_sources(paths: Sequence[Path], evaluations: Sequence[Path]) -> list[DumpFile]:
    """The files that are meant, each once, steps in order."""
    sources: dict[Path, DumpFile] = {}
    for root, evaluation in [*((path, False) for path in paths), *((path, True) for path in evaluations)]:
        for path in _files_of(root):
            source = DumpFile(path, evaluation or _EVAL_NAME.fullmatch(path.name) is not None)
            sources[path.resolve()] = source
    if not sources:
        raise ConfigError("no file to import was named")
    return sorted(sources.values(), key=lambda source: (source.evaluation, source.step or 0, str(source.path)))


def _files_of(root: Path) -> list[Path]:
    if root.is_dir():
        inside = [path for path in sorted(root.glob("*.jsonl")) if path.is_file()]
        if not inside:
            deeper = sorted({str(path.parent) for path in root.glob("*/*.jsonl")})
            hint = f"; there are some in {', '.join(deeper[:5])}" if deeper else ""
            raise DataError(f"{root} holds no .jsonl files{hint}")
        return inside
    if not root.is_file():
        raise DataError(f"{root} is neither a file nor a folder")
    return [root]


def _survey(sources: list[DumpFile], form: DumpFormat, skip_bad: bool, progress: Callable[[int], None]) -> Survey:
    survey = Survey(sources)
    done = 0
    for number, source in enumerate(sources):
        with _opened(source.path) as file:
            if file.peek(2)[:2] == _GZIP:  # type: ignore[attr-defined]
                raise DataError(f"{source.path} is compressed; unpack it first (gunzip)")
            for line_number, offset, line in _lines(file):
                try:
                    if line is None:
                        raise DataError(f"is longer than {LONGEST_LINE >> 20} MiB")
                    row = read_row(line, form, source.step)
                except DataError as error:
                    text = f"{source.path}, line {line_number} {error}"
                    if not skip_bad:
                        raise DataError(f"{text} (--skip-bad leaves such lines out)") from error
                    survey.bad += 1
                    survey.first_bad = survey.first_bad or text
                    continue
                survey.formats[row.form] += 1
                key = (source.evaluation or row.evaluation, row.step)
                survey.places[key].extend((number, offset, line_number))
                progress(done + offset)
            done += file.tell()
            progress(done)
    if not survey.lines:
        why = f": {survey.bad} bad lines, the first: {survey.first_bad}" if survey.bad else "; all are empty"
        raise DataError(f"nothing to import in {len(sources)} file{'s' if len(sources) > 1 else ''}{why}")
    return survey


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise cannot("read", path, error) from error


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes | None]]:
    """(number, byte offset, line) of every line that is not blank; None in place of a line that is too long."""
    number = 0
    while True:
        number += 1
        offset = file.tell()
        line = file.readline(LONGEST_LINE)
        if not line:
            return
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
            yield number, offset, None
        elif line.strip():
            yield number, offset, line


def _write(
    run: RunDir,
    survey: Survey,
    form: DumpFormat,
    images: Path | None,
    status: StatusWriter,
    progress: Callable[[int], None],
) -> Imported:
    translator, album = Translator(images), Album(run)
    written = groups = tokens = 0
    complete = True
    for evaluation, step in sorted(survey.places, key=lambda key: (key[1], key[0])):
        rows = _rows(survey, survey.places[evaluation, step], form)
        trajectories, sizes = _translate(translator, rows)
        groups += len({trajectory.sample.id for trajectory in trajectories})
        if evaluation:
            record(run, f"eval/step_{step:06d}.parquet", trajectories, album)
            metrics = eval_metrics(trajectories)
        else:
            record(run, f"trajectories/step_{step:06d}.parquet", trajectories, album)
            metrics = step_metrics(trajectories)
            complete = complete and all(trajectory.segments for trajectory in trajectories)
            tokens += sum(turn.completion_tokens for trajectory in trajectories for turn in trajectory.turns)
        if metrics:
            run.append_jsonl(METRICS, {"step": step} | ({"tokens": tokens} if complete and tokens else {}) | metrics)
        status.at(step)
        written += sizes
        progress(written)
    if translator.vocabulary.ids:
        run.write_json(TOKENS, translator.vocabulary.texts())
    evaluations = sum(evaluation for evaluation, _ in survey.places)
    result = Imported(
        run=run.path,
        files=len(survey.sources),
        lines=survey.lines,
        bad=survey.bad,
        first_bad=survey.first_bad,
        train_steps=len(survey.places) - evaluations,
        eval_steps=evaluations,
        groups=groups,
        markers=dict(translator.markers),
        notes=dict(translator.notes),
    )
    run.write_text(PLAN, summary(result))
    status.reason = f"imported {survey.lines} lines"
    return result


def _rows(survey: Survey, places: "array[int]", form: DumpFormat) -> Iterator[tuple[DumpRow, int]]:
    """The rows at these places, with their lengths in bytes."""
    numbers, offsets, lines = places[0::3], places[1::3], places[2::3]
    at = 0
    while at < len(numbers):
        source = survey.sources[numbers[at]]
        with _opened(source.path) as file:
            here = numbers[at]
            while at < len(numbers) and numbers[at] == here:
                file.seek(offsets[at])
                line = file.readline(LONGEST_LINE)
                try:
                    yield read_row(line, form, source.step), len(line)
                except DataError as error:
                    raise DataError(f"{source.path}, line {lines[at]} changed while it was read: {error}") from error
                at += 1


def _translate(translator: Translator, rows: Iterator[tuple[DumpRow, int]]) -> tuple[list[Trajectory], int]:
    """A step's trajectories, groups together and siblings numbered as they came."""
    siblings: Counter[str] = Counter()
    trajectories: list[Trajectory] = []
    size = 0
    for row, length in rows:
        name = sample_id(row)
        trajectories.append(translator.trajectory(row, siblings[name]))
        siblings[name] += 1
        size += length
    order = {name: position for position, name in enumerate(siblings)}
    return sorted(trajectories, key=lambda trajectory: order[trajectory.sample.id]), size


def _config(survey: Survey, form: DumpFormat) -> str:
    """Where the run came from; the config of the run that made the dump is not known."""
    about = {
        "imported": {
            "command": COMMAND,
            "format": sorted(dump_format.value for dump_format in survey.formats),
            "asked_format": form.value,
            "files": [str(source.path.resolve()) for source in survey.sources if not source.evaluation],
            "evaluation_files": [str(source.path.resolve()) for source in survey.sources if source.evaluation],
            "lines": survey.lines,
            "skipped_lines": survey.bad,
        }
    }
    return str(yaml.safe_dump(about, sort_keys=False, allow_unicode=True))


def summary(done: Imported) -> str:
    """What was imported, for people."""
    text = (
        f"imported {done.lines} lines of {done.files} files: {done.train_steps} training steps, "
        f"{done.eval_steps} evaluations, {done.groups} groups\n"
    )
    how = {
        Markers.CHATML: "split at ChatML markers",
        Markers.LLAMA3: "split at Llama-3 headers",
        Markers.PLAIN: "split at plain role lines (a policy that writes such a line itself is split there too)",
        Markers.NONE: "without markers: prompt and output whole",
    }
    for markers, count in sorted(done.markers.items()):
        text += f"  {count} conversations {how[markers]}\n"
    for note, count in sorted(done.notes.items()):
        text += f"  {count} {note}\n"
    if done.bad:
        text += f"  {done.bad} bad lines left out, the first: {done.first_bad}\n"
    return text + "  a dump does not say: timings, advantages, the status of tool calls, often why an episode ended\n"
