"""One line of a rollout dump, checked: verl's `<step>.jsonl` and RL logging board's `rollout_data_rank*.jsonl`."""

import enum
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from turnwise.errors import DataError


class DumpFormat(enum.StrEnum):
    """Which system's format a dump has."""

    AUTO = "auto"
    VERL = "verl"
    RL_LOGGING_BOARD = "rl_logging_board"


SHAPES = {
    DumpFormat.VERL: ("input", "output"),
    DumpFormat.RL_LOGGING_BOARD: ("prompt", "response"),
}
"""The keys by which a shape is known."""
KNOWN = (
    "verl: input, output, and where they exist gts, score, step, uid, and any reward keys; "
    "rl_logging_board: prompt, response, step, and where they exist response_tokens, logprobs, ref_logprobs, values, "
    "token_rewards, reward, ground_truth"
)
LARGEST_STEP = 10**9
_TOKEN_KEYS = ("logprobs", "ref_logprobs", "values", "token_rewards")
# Numbers that are no part of a reward: where a row stands, how long it is, or what another model got.
_FACTS = ("index", "idx", "id", "rank", "epoch", "global_step", "num_turns", "__num_turns__", "prompt_length",
          "response_length", "validation", "ref_reward", "valid_reward")  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """What a dump says about each token of an output; every list is as long as `texts`, nan where it says nothing."""

    texts: list[str]
    logprobs: list[float] | None
    ref_logprobs: list[float] | None
    values: list[float] | None
    rewards: list[float] | None


@dataclass(frozen=True, slots=True)
class DumpRow:
    """One line, whichever system wrote it; None is what it does not say."""

    form: DumpFormat
    step: int
    prompt: str
    output: str
    reward: float | None
    ground_truth: Any
    uid: str | None
    data_source: str | None
    evaluation: bool
    tokens: TokenColumns | None
    images: tuple[str, ...] = ()
    parts: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)


def read_row(line: bytes, form: DumpFormat, file_step: int | None) -> DumpRow:
    """The row in a line; DataError says what is wrong with it. `file_step` is the step that the file's name says."""
    try:
        content = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise DataError("is nested too deeply") from error
    except ValueError as error:  # also a number of more digits than Python converts
        raise DataError(f"is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"is {_kind(content)}, not an object")
    try:
        return _row(content, _shape(content, form), file_step)
    except RecursionError as error:
        raise DataError("is nested too deeply") from error


def _shape(row: Mapping[str, Any], form: DumpFormat) -> DumpFormat:
    fitting = [shape for shape, keys in SHAPES.items() if all(key in row for key in keys)]
    if form in fitting or (form is DumpFormat.AUTO and len(fitting) == 1):
        return fitting[0] if form is DumpFormat.AUTO else form
    keys = ", ".join(repr(key)[:60] for key in list(row)[:30]) or "none"
    if len(fitting) > 1:
        raise DataError(f"fits several shapes (keys {keys}); choose one with --format")
    wanted = "no known shape" if form is DumpFormat.AUTO else f"not the shape {form.value}"
    raise DataError(f"has {wanted}. Keys found: {keys}. Shapes known: {KNOWN}")


def _row(content: dict[str, Any], form: DumpFormat, file_step: int | None) -> DumpRow:
    verl = form is DumpFormat.VERL
    prompt_key, output_key = SHAPES[form]
    reward_key, truth_key = ("score", "gts") if verl else ("reward", "ground_truth")
    tokens = None if verl else _tokens(content)
    reward = _optional_number(content, reward_key)
    used = {prompt_key, output_key, reward_key, truth_key, "step", "uid", "data_source", "image_path"}
    if not verl:
        used |= {"response_tokens", *_TOKEN_KEYS}
    extra = {key: value for key, value in content.items() if key not in used}
    parts = {key: float(value) for key, value in extra.items() if key not in _FACTS and _is_part(value)}
    info = {key: _storable(value) for key, value in extra.items() if key not in parts}
    images = _images(content.get("image_path"))
    if content.get("image_path") is not None:
        info["image_path"] = _storable(content["image_path"])
    return DumpRow(
        form=form,
        step=_step(content, file_step),
        prompt=_text(content, prompt_key),
        output=_text(content, output_key),
        reward=reward,
        ground_truth=_storable(content.get(truth_key)),
        uid=_optional_text(content, "uid"),
        data_source=_optional_text(content, "data_source"),
        evaluation=content.get("validation") is True,
        tokens=tokens,
        images=images,
        parts=parts,
        info=info,
    )


def _tokens(row: Mapping[str, Any]) -> TokenColumns | None:
    texts = row.get("response_tokens")
    if texts is None:
        lonely = [key for key in _TOKEN_KEYS if row.get(key) is not None]
        if lonely:
            raise DataError(f"has {', '.join(lonely)} without response_tokens")
        return None
    if not isinstance(texts, list):
        raise DataError(f"response_tokens is {_kind(texts)}, not a list of texts")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"response_tokens[{index}] is {_kind(text)}, not text")
    columns = {key: _numbers(row, key, len(texts)) for key in _TOKEN_KEYS}
    return TokenColumns(
        texts, columns["logprobs"], columns["ref_logprobs"], columns["values"], columns["token_rewards"]
    )


def _numbers(row: Mapping[str, Any], key: str, length: int) -> list[float] | None:
    values = row.get(key)
    if values is None:
        return None
    if not isinstance(values, list):
        raise DataError(f"{key} is {_kind(values)}, not a list of numbers")
    if len(values) != length:
        raise DataError(f"{key} has {len(values)} values for {length} response_tokens")
    if set(map(type, values)) <= {float}:  # nearly always, and most of a dump
        return values
    return [math.nan if value is None else _number(value, f"{key}[{index}]") for index, value in enumerate(values)]


def _step(row: Mapping[str, Any], file_step: int | None) -> int:
    value = row.get("step")
    if value is None:
        if file_step is None:
            raise DataError("has no step, and the file is not named <step>.jsonl")
        value = file_step
    number = _number(value, "step")
    if not (0 <= number < LARGEST_STEP and number.is_integer()):  # nan fails both comparisons
        raise DataError(f"step is {str(value)[:40]}, not a whole number from 0 to {LARGEST_STEP - 1}")
    return int(number)


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"{key} is {_kind(value)}, not text")
    return value


def _optional_text(row: Mapping[str, Any], key: str) -> str | None:
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(f"{key} is {_kind(value)}, not text")
    return str(value)


def _optional_number(row: Mapping[str, Any], key: str) -> float | None:
    if row.get(key) is None:
        return None
    number = _number(row[key], key)
    if not math.isfinite(number):
        raise DataError(f"{key} is {number}")
    return number


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{name} is {_kind(value)}, not a number")
    try:
        return float(value)
    except OverflowError as error:
        raise DataError(f"{name} is too large a number") from error


def _is_part(value: Any) -> bool:
    """A number or truth value that a reward part can hold."""
    if not isinstance(value, bool | int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _images(value: Any) -> tuple[str, ...]:
    many = value if isinstance(value, list) else [value]
    return tuple(path for path in many if isinstance(path, str) and path)


def _storable(value: Any) -> Any:
    """JSON without what JSON lacks: NaN, infinities and numbers of any size become text."""
    match value:
        case bool():
            return value
        case int():
            return value if abs(value) < 2**63 else _digits(value)
        case float():
            return value if math.isfinite(value) else str(value)
        case list():
            return [_storable(entry) for entry in value]
        case dict():
            return {key: _storable(entry) for key, entry in value.items()}
        case _:
            return value


def _digits(value: int) -> str:
    return f"{value:e}" if abs(value) < 10**300 else f"a number of {value.bit_length()} bits"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", int: "a number", float: "a number"}
    return names.get(type(value), "null")
