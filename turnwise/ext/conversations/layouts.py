"""The layouts in which others write conversations, known by their columns; each becomes messages as OpenAI has them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.data.values import FieldError, as_object, as_text, describe, join, shorten
from turnwise.errors import DataError
from turnwise.errors.nearest_name import nearest, unknown

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Entries:
    """The messages of a row, each an object with role and content; the first `context` of them are only read."""

    messages: list[Any]
    context: int | None = None
    """None where the row does not say: it is what comes before the assistant's first answer."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """One way to write a conversation in the columns of a row."""

    name: str
    columns: tuple[str, ...]
    """Those by which it is known; a row without one of them is refused."""
    read: Callable[[Values], Entries]
    optional: tuple[str, ...] = ()
    """Further columns that it reads, beside COMMON."""


COMMON = ("tools", "images")
"""Columns that every layout may have."""
_SPEAKERS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "model": "assistant", "tool": "tool", "observation": "tool",
    "function_response": "tool", "function_call": "function_call",
}  # fmt: skip
"""Who speaks in ShareGPT's rows, by the role that he has elsewhere."""


def layout_of(values: Values, where: str) -> RowLayout:
    """The layout of a row with these columns; DataError, which names the nearest, when it is none of them."""
    for layout in LAYOUTS:
        if all(column in values for column in layout.columns):
            return _by_speakers(layout, values)
    if "chosen" in values and "rejected" in values:
        raise DataError(f"{where}: pairs of answers (chosen, rejected) teach a preference: name the file in dpo.files")
    names = sorted({column for layout in LAYOUTS for column in layout.columns})
    hints = [nearest(shorten(column), names) for column in values]
    hint = next((text for text in hints if text.startswith("did you mean")), "")
    known = "; ".join(f"{' and '.join(layout.columns)} ({layout.name})" for layout in LAYOUTS)
    columns = ", ".join(shorten(column) for column in values) or "none"
    raise DataError(
        f"{where}: the columns {columns} are no layout of conversations{f': {hint}' if hint else '.'} Known are {known}"
    )


def _by_speakers(layout: RowLayout, values: Values) -> RowLayout:
    """A column `conversations` holds ShareGPT's `from` and `value`, or messages as elsewhere."""
    entries = values[layout.columns[0]]
    if layout is not SHAREGPT or not (isinstance(entries, list) and entries and isinstance(entries[0], dict)):
        return layout
    return SHAREGPT_MESSAGES if "role" in entries[0] else layout


# --- the layouts --------------------------------------------------------------------------------------------------


def _list_of(values: Values, column: str) -> list[Any]:
    entries = values.get(column)
    if isinstance(entries, str):  # a cell of a table, and of some parquet files
        try:
            entries = json.loads(entries)
        except (ValueError, RecursionError) as error:
            raise FieldError(column, f"a text that is not the JSON of a list: {shorten(str(error))}") from error
    if not isinstance(entries, list) or not entries:
        got = "missing" if entries is None else f"expected a list of messages, got {describe(entries)}"
        raise FieldError(column, "empty" if entries == [] else got)
    return entries


def _messages(column: str) -> Callable[[Values], Entries]:
    return lambda values: Entries(_list_of(values, column))


def _sharegpt(values: Values) -> Entries:
    system = values.get("system")
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    for number, entry in enumerate(_list_of(values, "conversations")):
        field = f"conversations[{number}]"
        turn = as_object(entry, field)
        speaker = as_text(turn.get("from"), join(field, "from"))
        if speaker not in _SPEAKERS:
            raise FieldError(join(field, "from"), unknown("speaker", shorten(speaker), _SPEAKERS))
        rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
        role, said = _SPEAKERS[speaker], turn.get("value")
        if role == "function_call":
            messages.append({"role": "assistant", "tool_calls": _calls_in(said, join(field, "value")), **rest})
        else:
            messages.append({"role": role, "content": said, **rest})
    return Entries(messages)


def _calls_in(text: Any, field: str) -> list[Any]:
    """The calls of a message that is nothing else: the JSON of one, or of a list."""
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise FieldError(field, f"a function_call that is not valid JSON: {shorten(str(error))}") from error
    return value if isinstance(value, list) else [value]


def _prompt_and_completion(values: Values) -> Entries:
    prompt, completion = (_as_messages(values, *side) for side in (("prompt", "user"), ("completion", "assistant")))
    return Entries([*prompt, *completion], len(prompt))


def _as_messages(values: Values, column: str, role: str) -> list[Any]:
    """A list of messages; a text is one of this role's."""
    text = values.get(column)
    is_list = isinstance(text, list) or (isinstance(text, str) and text.lstrip().startswith('[{"role"'))
    return _list_of(values, column) if is_list else [{"role": role, "content": as_text(text, column)}]


def _instruction(values: Values) -> Entries:
    asked, more = as_text(values.get("instruction"), "instruction"), values.get("input")
    system = values.get("system")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": f"{asked}\n{more}" if more else asked})
    return Entries(
        [*messages, {"role": "assistant", "content": as_text(values.get("output"), "output")}], len(messages)
    )


MESSAGES = RowLayout("messages of OpenAI, Hugging Face and verl", ("messages",), _messages("messages"))
SHAREGPT_MESSAGES = RowLayout(MESSAGES.name, ("conversations",), _messages("conversations"))
SHAREGPT = RowLayout("ShareGPT", ("conversations",), _sharegpt, ("system",))
LAYOUTS = (
    MESSAGES,
    SHAREGPT,
    RowLayout("prompt and completion, as TRL has them", ("prompt", "completion"), _prompt_and_completion),
    RowLayout("Alpaca", ("instruction", "output"), _instruction, ("input", "system")),
)
"""In the order in which they are tried."""
