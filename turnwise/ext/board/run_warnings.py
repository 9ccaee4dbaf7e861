"""What a run warned of: the lines of its warnings.jsonl, each kind once, and what the report of an evaluation says."""

import re
from dataclasses import dataclass

from turnwise.ext.board.json_values import clean_text
from turnwise.ext.board.run_summary import read_report
from turnwise.storage.file_tail import end_of_text
from turnwise.storage.json_text import parse
from turnwise.storage.run_dir import WARNINGS, RunDir
from turnwise.system.files import cannot

_BYTES, _LONGEST, _SHORT, _MOST = 200_000, 2000, 200, 40
_NUMBER = re.compile(r"\d[\d.,]*(e[-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class RunWarning:
    """A kind of warning, in its newest words: `RunWarning("no learning signal for 3 steps: ...", 1, 3, 3)`."""

    text: str
    count: int
    first_step: int
    last_step: int


def run_warnings(run: RunDir) -> list[RunWarning]:
    """The newest kind first. What differs in numbers alone is one kind; a damaged line stands as it is."""
    path = run.path / WARNINGS
    try:
        lines = end_of_text(path, _BYTES).split("\n")
    except OSError as error:
        raise cannot("read", path, error) from error
    kinds: dict[str, RunWarning] = {}
    for line in filter(str.strip, lines):
        try:
            record = parse(line)
            text, step = clean_text(record["text"])[:_LONGEST], int(record["step"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            text, step = f"{WARNINGS} has a line that cannot be read: {clean_text(line[:_SHORT])}", 0
        kind = _NUMBER.sub("#", text)
        before = kinds.pop(kind, None)
        count, first = (0, step) if before is None else (before.count, before.first_step)
        kinds[kind] = RunWarning(text, count + 1, first, step)
    return [*_reported(run), *reversed(kinds.values())][:_MOST]


def _reported(run: RunDir) -> list[RunWarning]:
    texts = (read_report(run) or {}).get("warnings")
    known = texts if isinstance(texts, list) else []
    return [RunWarning(clean_text(text)[:_LONGEST], 1, 0, 0) for text in known if isinstance(text, str)]
