"""A row (prompt, data_source, reward_model, extra_info) becomes a Sample; wrong values are refused by name."""

import copy
import difflib
import functools
from collections.abc import Iterator
from typing import Any

from turnwise.data.images.cells import ROOT, ImageCells, RowImages
from turnwise.data.prompts import read_prompt
from turnwise.data.rows import Row, RowError
from turnwise.data.values import FieldError, as_object, as_text, describe, join, plain, shorten
from turnwise.errors.nearest_name import nearest
from turnwise.extensions import named
from turnwise.system.plugins import load
from turnwise.types import InteractionSpec, Sample

_COLUMNS = (
    "data_source",
    "reward_model",
    "extra_info",
    "agent_name",
    "images",
    "tools_kwargs",
    "interaction_kwargs",
    ROOT,
)
_UNREAD_COLUMNS = ("ability", "uid")
_EXTRA_INFO = ("tools_kwargs", "interaction_kwargs", "need_tools_kwargs", "tool_selection")
_UNREAD_EXTRA_INFO = ("index", "split", "question", "answer")
_NOT_SHOWN = ("videos", "video", "audios", "audio")
_TOOL_KWARGS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
PLAIN_PROMPT = "plain_prompt"
"""In `Sample.info` of a row whose prompt is a text and no list of messages."""


IMAGE_NAMES = "image_names"
"""In `Sample.info`: the file names of images that the row holds itself, null for those without one."""


def to_sample(
    row: Row, *, prompt_key: str, default_source: str | None = None, images: ImageCells | None = None
) -> Sample:
    """The sample in a row; `default_source` is the data source of one that names none, `images` reads its images.

    `Sample.info` keeps `extra_info` whole, `reward_model` without its ground truth, and every column that has no
    field of its own (`ability`, `uid`, ...). Keyword arguments for an interaction that the row does not name are in
    `info["interaction_kwargs"]`.
    """
    try:
        return _to_sample(row, prompt_key, default_source, images or ImageCells())
    except FieldError as error:
        raise RowError(row, error.field, error.problem) from error


def misspelt(values: dict[str, Any], *, prompt_key: str) -> Iterator[tuple[str, str]]:
    """(field, problem) of every name that nobody reads although it looks like one that this row lacks."""
    yield from _near("", values, (prompt_key, *_COLUMNS), _UNREAD_COLUMNS)
    if "tool_selection" in values:
        yield "tool_selection", "unknown column: it belongs into extra_info"
    for name, columns, unread in (
        ("extra_info", _EXTRA_INFO, _UNREAD_EXTRA_INFO),
        ("reward_model", ("ground_truth",), ("style",)),
    ):
        inner = values.get(name)
        if isinstance(inner, dict):
            yield from _near(name, inner, columns, unread)


def _to_sample(row: Row, prompt_key: str, default_source: str | None, reader: ImageCells) -> Sample:
    values: dict[str, Any] = plain(row.values, "") or {}
    if prompt_key not in values:
        values = _with_prompt(values, prompt_key)
    for name in _NOT_SHOWN:
        if values.get(name) not in (None, "", [], {}):
            raise FieldError(name, "only text and images are supported: leave such rows out")
    content = values.pop(prompt_key)
    cells = reader.of_row(row.file, values.pop(ROOT, None))
    prompt, images = read_prompt(content, prompt_key, values.pop("images", None), cells)
    if cells.names:
        values[IMAGE_NAMES] = [cells.names.get(image.source) for image in images]
    if isinstance(content, str):
        values[PLAIN_PROMPT] = True
    reward_model = as_object(values.pop("reward_model", None), "reward_model")
    ground_truth = reward_model.pop("ground_truth", None)
    if "style" in reward_model:
        as_text(reward_model["style"], "reward_model.style")
    extra = as_object(values.pop("extra_info", None), "extra_info")
    _check_extra_info(extra)
    tools_kwargs = _read_tools_kwargs(*_either(values, extra, "tools_kwargs"), cells)
    interaction_kwargs, field = _either(values, extra, "interaction_kwargs")
    name = interaction_kwargs.pop("name", None)
    interaction = None
    if name is not None:
        interaction = InteractionSpec(as_text(name, join(field, "name")), interaction_kwargs)
    elif interaction_kwargs:
        values["interaction_kwargs"] = interaction_kwargs
    named = values.pop("data_source", None)
    if named is None and default_source is None:
        raise FieldError("data_source", "missing; data.default_source=NAME sets it for rows without one")
    data_source = as_text(default_source if named is None else named, "data_source")
    agent = values.pop("agent_name", None)
    rest = {"extra_info": extra, "reward_model": reward_model}
    return Sample(
        id=f"{row.name}:{row.number}",
        prompt=prompt,
        data_source=data_source,
        ground_truth=ground_truth,
        agent=None if agent is None else as_text(agent, "agent_name"),
        tools=_read_selection(extra.get("tool_selection")),
        tools_kwargs=tools_kwargs,
        interaction=interaction,
        images=images,
        info=values | {column: value for column, value in rest.items() if value},
    )


def _with_prompt(values: dict[str, Any], prompt_key: str) -> dict[str, Any]:
    """The columns with a prompt: a row in a layout that an extension reads has one under other names."""
    layouts = named("prompts") if prompt_key == "prompt" else {}
    spec = next((layouts[column] for column in layouts if column in values), None)
    if spec is None:
        raise FieldError(prompt_key, f"missing: {nearest(prompt_key, map(shorten, values))}")
    columns: dict[str, Any] = load(spec, "reader of rows")(values)
    return columns


def _check_extra_info(extra: dict[str, Any]) -> None:
    index, split, need = extra.get("index"), extra.get("split"), extra.get("need_tools_kwargs")
    if isinstance(index, bool) or not isinstance(index, int | str | None):
        raise FieldError("extra_info.index", f"expected a whole number or text, got {describe(index)}")
    if not isinstance(split, str | None):
        raise FieldError("extra_info.split", f"expected text, got {describe(split)}")
    if not isinstance(need, bool | None):
        raise FieldError("extra_info.need_tools_kwargs", f"expected true or false, got {describe(need)}")


def _either(values: dict[str, Any], extra: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """An object and its path: it stands in extra_info or, as older documents say, in a column of its own."""
    path = f"extra_info.{name}"
    column = as_object(values.pop(name, None), name)
    member = as_object(extra.get(name), path)
    if column and member and column != member:
        raise FieldError(name, f"differs from {path}; keep one of them")
    # extra_info goes to the user's scorers, who may change it: the copy is ours.
    return (column, name) if column else (copy.deepcopy(member), path)


def _read_tools_kwargs(value: dict[str, Any], field: str, cells: RowImages) -> dict[str, dict[str, Any]]:
    for tool, kwargs in value.items():
        path = join(field, shorten(tool))
        for key, inner in as_object(kwargs, path).items():
            if key in _TOOL_KWARGS:
                hook = as_object(inner, join(path, key))
                if key == "create_kwargs" and "image" in hook:
                    hook["image"] = cells.tool_image(hook["image"], join(path, "create_kwargs.image"))
    return value


def _read_selection(value: Any) -> tuple[str, ...] | None:
    """The tools a row chooses; none at all is a choice too."""
    if value is None:
        return None
    field = "extra_info.tool_selection"
    if not isinstance(value, list):
        raise FieldError(field, f"expected a list of tool names, got {describe(value)}")
    names = tuple(as_text(name, f"{field}[{i}]") for i, name in enumerate(value))
    if len(set(names)) < len(names):
        raise FieldError(field, "a tool appears twice")
    return names


def _near(
    field: str, values: dict[str, Any], columns: tuple[str, ...], unread: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    for name in values:
        if name in columns or name in unread or values[name] is None:
            continue
        absent = tuple(candidate for candidate in columns if values.get(candidate) is None)
        hit = _closest(name, absent)
        if hit is not None:
            yield join(field, name), f"unknown column: did you mean {hit!r}?"


@functools.lru_cache(maxsize=1024)
def _closest(name: str, candidates: tuple[str, ...]) -> str | None:
    """A name so close that it can only be a slip; the general cutoff would also catch `uuid` and `source`."""
    return next(iter(difflib.get_close_matches(name, candidates, n=1, cutoff=0.85)), None)
