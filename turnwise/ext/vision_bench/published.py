"""The published files of V*Bench, HR-Bench and MathVista, question by question, in the words of one type."""

import enum
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.data.images.cells import from_base64
from turnwise.data.row_formats import LONGEST_LINE
from turnwise.data.rows import Row, RowError, expand, read_rows
from turnwise.data.values import FieldError, as_object, as_text, describe, plain, shorten
from turnwise.errors import DataError
from turnwise.system.image_bytes import KINDS, media_type

LETTERS = "ABCDEFGHIJ"
_LONGEST_INDEX = 64
"""Characters of a cell that can only be the index of another row; no image is as small."""
LARGEST_IMAGE = 1 << 27
"""Bytes of an image file; those of HR-Bench 8K have up to 20 million."""


class AnswerKind(enum.StrEnum):
    """How an answer is compared."""

    LETTER = "letter"
    """The letter of an option, or its text."""
    INTEGER = "integer"
    FLOAT = "float"
    """A number, at the precision that the question asks for."""
    LIST = "list"
    """Numbers in their order."""
    TEXT = "text"
    """Words."""


@dataclass(frozen=True, slots=True)
class BenchQuestion:
    """One question as its file has it: `BenchQuestion("12", "mathvista", "How many ...?", b"\\x89PNG", "B")`."""

    id: str
    data_source: str
    prompt: str
    image: bytes | None
    """None where the table names an earlier row in its place: that of `image_of`."""
    truth: str
    """The letter of the right option, or the answer itself."""
    kind: AnswerKind = AnswerKind.LETTER
    options: tuple[str, ...] = ()
    precision: int = 0
    """Digits behind the point that are compared."""
    image_of: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)
    """What else the file says of it, for reports."""


Fields = Mapping[str, Any]
Reader = Callable[[Path], Iterator[BenchQuestion]]
_OPTION = re.compile(r"^\s*\(?([A-J])[).:]\s*(.+?)\s*$", re.MULTILINE)
_CHOICE_HINT = "Answer with the letter of the right option."


# --- V*Bench ------------------------------------------------------------------------------------------------------


def read_vstar(folder: Path) -> Iterator[BenchQuestion]:
    """`test_questions.jsonl` beside the folders of images, each with a .json that says where its targets are."""
    for row in read_rows(_only_file(folder, "test_questions.jsonl")):
        yield _asked(row, _vstar)


def _vstar(values: Fields, folder: Path) -> BenchQuestion:
    text = as_text(values.get("text"), "text")
    options = tuple(option for _, option in _OPTION.findall(text))
    path = _inside(folder, as_text(values.get("image"), "image"), "image")
    source = f"vstar/{_name(values.get('category'), 'category')}"
    truth = _letter(values.get("label"), options, "label")
    boxes = _boxes(path.with_suffix(".json"))
    info = {"target_boxes": boxes} if boxes else {}
    return BenchQuestion(
        _id(values, "question_id"), source, text, _file(path, "image"), truth, options=options, info=info
    )


def _boxes(path: Path) -> list[list[float]]:
    """Where the targets are, as [left, upper, right, lower]; [] where no file says so."""
    if not path.is_file():
        return []
    said = _json(path)
    entries = said.get("bbox") if isinstance(said, dict) else None
    if not isinstance(entries, list):
        raise DataError(f"{path}: bbox: expected a list, got {describe(entries)}")
    boxes = []
    for box in entries:
        if not isinstance(box, list) or len(box) != 4 or not all(type(side) in (int, float) for side in box):
            raise DataError(f"{path}: bbox: expected boxes of left, upper, width and height")
        left, upper, width, height = map(float, box)
        boxes.append([left, upper, left + width, upper + height])
    return boxes


# --- HR-Bench -----------------------------------------------------------------------------------------------------


def hrbench_reader(size: str) -> Reader:
    """Reads `hr_bench_4k.parquet`, or a table such as `HRBench4K.tsv`."""

    def asked(values: Fields, folder: Path) -> BenchQuestion:
        return _hrbench(values, size)

    def read(folder: Path) -> Iterator[BenchQuestion]:
        for row in read_rows(_only_file(folder, f"*{size}*.parquet", f"*{size}*.tsv")):
            yield _asked(row, asked)

    return read


def _hrbench(values: Fields, size: str) -> BenchQuestion:
    options = tuple(_option(values, letter) for letter in LETTERS[:4])
    listed = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))
    image, image_of = _of_cell(values.get("image"))
    cycle = values.get("cycle_category")
    return BenchQuestion(
        _id(values, "index"),
        f"hrbench_{size}/{_name(values.get('category'), 'category')}",
        f"{as_text(values.get('question'), 'question')}\n{listed}\n{_CHOICE_HINT}",
        image,
        _letter(values.get("answer"), options, "answer"),
        options=options,
        image_of=image_of,
        info={} if cycle is None else {"cycle_category": str(cycle)},
    )


def _option(values: Fields, letter: str) -> str:
    """The text of an option; tables of texts give numbers as they are written."""
    value = values.get(letter)
    return as_text(str(value) if type(value) in (int, float) else value, letter)


def _of_cell(value: Any) -> tuple[bytes | None, str]:
    """The image in base64 or as it is, or the index of the row that has it, as tables share them."""
    if isinstance(value, dict):
        value = value.get("bytes")
    if isinstance(value, str) and 0 < len(value.strip()) <= _LONGEST_INDEX:
        return None, value.strip()
    content = from_base64(value, certain=True) if isinstance(value, str) else value
    if not isinstance(content, bytes):
        raise FieldError("image", f"not a {KINDS} image in base64")
    return _checked(content, "image"), ""


# --- MathVista ----------------------------------------------------------------------------------------------------


def read_mathvista(folder: Path) -> Iterator[BenchQuestion]:
    """`data/testmini-*.parquet`, or `testmini.json` beside `images/`."""
    whole = [path for path in (folder / "testmini.json", folder / "data" / "testmini.json") if path.is_file()]
    if whole:
        yield from _of_object(whole[0])
        return
    parts = sorted(folder.glob("testmini*.parquet")) or sorted(folder.glob("data/testmini*.parquet"))
    if not parts:
        raise DataError(f"{folder}: holds neither testmini.json nor data/testmini-*.parquet")
    for path in parts:
        for row in read_rows(path):
            yield _asked(row, _mathvista)


def _of_object(path: Path) -> Iterator[BenchQuestion]:
    """An object of questions by their number."""
    entries = _json(path)
    if not isinstance(entries, dict):
        raise DataError(f"{path}: expected an object of questions, got {describe(entries)}")
    for number, (pid, values) in enumerate(entries.items()):
        if not isinstance(values, dict):
            raise DataError(f"{path}: the question {shorten(pid)} is {describe(values)}, not an object")
        yield _asked(Row(path, number, {"pid": pid, **values}), _mathvista)


def _mathvista(values: Fields, folder: Path) -> BenchQuestion:
    options = tuple(as_text(option, "choices") for option in values.get("choices") or ())
    answer = as_text(values.get("answer"), "answer (the split test has none; testmini does)")
    if options:
        kind, truth, hint = AnswerKind.LETTER, _letter_of_text(answer, options), _CHOICE_HINT
    else:
        kind, truth = _kind(values.get("answer_type")), answer
        hint = "Answer with words." if kind is AnswerKind.TEXT else f"Answer with {_NAMES[kind]}."
    precision = values.get("precision")
    digits = int(precision) if isinstance(precision, int | float) and 0 <= precision <= 12 else 0
    if kind is AnswerKind.FLOAT and digits:
        hint = f"Answer with a number of {digits} decimal places."
    metadata = as_object(values.get("metadata"), "metadata")
    task = metadata.get("task")
    asked = values.get("query")
    return BenchQuestion(
        _id(values, "pid"),
        f"mathvista/{_name(task, 'metadata.task')}" if task else "mathvista",
        asked if isinstance(asked, str) and asked.strip() else _query(values, options, hint),
        _mathvista_image(values, folder),
        truth,
        kind,
        options,
        digits,
        info={name: metadata[name] for name in ("category", "grade", "source") if isinstance(metadata.get(name), str)},
    )


_NAMES = {AnswerKind.INTEGER: "a whole number", AnswerKind.FLOAT: "a number", AnswerKind.LIST: "a list such as [1, 2]"}


def _query(values: Fields, options: tuple[str, ...], hint: str) -> str:
    """The words of a question whose file has none made for models."""
    unit = values.get("unit")
    question = as_text(values.get("question"), "question") + (f" (in {unit})" if unit else "")
    listed = [f"({letter}) {option}" for letter, option in zip(LETTERS, options, strict=False)]
    return "\n".join([question, *listed, hint])


def _kind(value: Any) -> AnswerKind:
    kinds = (AnswerKind.INTEGER, AnswerKind.FLOAT, AnswerKind.LIST, AnswerKind.TEXT)
    if value not in kinds:
        raise FieldError("answer_type", f"expected one of {', '.join(kinds)}, got {shorten(repr(value))}")
    return AnswerKind(value)


def _letter_of_text(answer: str, options: tuple[str, ...]) -> str:
    """MathVista's answer is the text of the option."""
    if len(options) > len(LETTERS):
        raise FieldError("choices", f"{len(options)} options, which is more than {len(LETTERS)}")
    if answer not in options:
        raise FieldError("answer", f"{shorten(answer)!r} is none of the choices")
    return LETTERS[options.index(answer)]


def _mathvista_image(values: Fields, folder: Path) -> bytes:
    decoded = values.get("decoded_image")
    if isinstance(decoded, dict) and isinstance(decoded.get("bytes"), bytes):
        return _checked(decoded["bytes"], "decoded_image")
    return _file(_inside(folder, as_text(values.get("image"), "image"), "image"), "image")


# --- what all of them share ---------------------------------------------------------------------------------------


def _asked(row: Row, read: Callable[[Fields, Path], BenchQuestion]) -> BenchQuestion:
    try:
        return read(plain(dict(row.values), "") or {}, row.file.parent)
    except FieldError as error:
        raise RowError(row, error.field, error.problem) from error


def _only_file(folder: Path, *patterns: str) -> Path:
    """The one file of these names, however they are capitalised."""
    try:
        names = [path for path in sorted(expand(folder).iterdir()) if path.is_file()]
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from error
    lowered = [pattern.lower() for pattern in patterns]
    matching = [path for path in names if any(Path(path.name.lower()).match(pattern) for pattern in lowered)]
    if len(matching) != 1:
        found = f"several: {', '.join(path.name for path in matching)}" if matching else "none"
        raise DataError(f"{folder}: must hold one {' or '.join(patterns)}, and holds {found}")
    return matching[0]


def _json(path: Path) -> Any:
    try:
        if path.stat().st_size > LONGEST_LINE:
            raise DataError(f"{path}: more than {LONGEST_LINE / 2**30:g} GiB")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise DataError(f"{path}: JSON nested too deeply") from error
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {shorten(str(error), 200)}") from error


def _inside(folder: Path, name: str, where: str) -> Path:
    try:
        path = (folder / name).resolve()
        is_there = path.is_relative_to(folder.resolve()) and path.is_file()
    except (OSError, ValueError, RuntimeError):  # a name that is no path: too long, a zero byte, a loop of links
        is_there = False
    if not is_there:
        raise FieldError(where, f"there is no file {shorten(name)!r} inside {folder}")
    return path


def _file(path: Path, where: str) -> bytes:
    try:
        if path.stat().st_size > LARGEST_IMAGE:
            raise FieldError(where, f"{path.name} has more than {LARGEST_IMAGE >> 20} MiB")
        return _checked(path.read_bytes(), where)
    except OSError as error:
        raise FieldError(where, f"{path.name} cannot be read: {error.strerror}") from error


def _checked(content: bytes, where: str) -> bytes:
    if media_type(content) is None:
        raise FieldError(where, f"these bytes are not a {KINDS} image")
    return content


def _id(values: Fields, key: str) -> str:
    value = values.get(key)
    if not isinstance(value, str | int) or isinstance(value, bool) or not str(value).strip():
        raise FieldError(key, f"expected a number or text, got {describe(value)}")
    return str(value)


def _name(value: Any, key: str) -> str:
    """A category as a part of a data source's name."""
    text = re.sub(r"\W+", "_", as_text(value, key).strip().lower()).strip("_")
    if not text or len(text) > 60:
        raise FieldError(key, f"{shorten(str(value))!r} is no name")
    return text


def _letter(value: Any, options: tuple[str, ...], key: str) -> str:
    letters = LETTERS[: len(options)]
    if not options:
        raise FieldError("text", "names no options such as (A) ...")
    if not isinstance(value, str) or len(value) != 1 or value not in letters:
        raise FieldError(key, f"expected one of {', '.join(letters)}, got {shorten(repr(value))}")
    return value
