"""Values of a config as nested dicts: laid over one another, flattened, made of a program's values, and placed."""

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError


def over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Two trees as one; where both say something, it is what `above` says."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(key), dict)
        merged[key] = over(below[key], value) if both else value
    return merged


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value by its dotted key; an empty dict is a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def check_keys(tree: Mapping[Any, Any], where: object) -> None:
    """ConfigError for a key that is no name."""
    for key, value in tree.items():
        if not isinstance(key, str) or not key:
            raise ConfigError(f"{where}: a key is a name, not {key!r}")
        if isinstance(value, dict):
            check_keys(value, where)


def nest(values: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """What a program says as a file would: `{"training.steps": 2}`, `{"training": {"steps": 2}}` and
    `{"training": TrainingConfig(steps=2)}` are the same."""
    check_keys(values, where)
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        plain = _plain(value, f"{where}: {key}")
        if is_section(value) and not plain:
            continue
        branch: dict[str, Any] = {name: plain}
        for section in reversed(sections):
            branch = {section: branch}
        if twice := sorted(flatten(tree).keys() & flatten(branch).keys()):
            raise ConfigError(f"{where}: {twice[0]} is given twice")
        tree = over(tree, branch)
    return tree


def is_section(value: object) -> bool:
    """Whether it is a section of the config as an object, such as TrainingConfig(steps=2)."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def changed(section: Any, where: str) -> dict[str, Any]:
    """What a section says: the fields that are not at their defaults; the others leave room for a task's values."""
    untouched = type(section)()
    own = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    said = {name: value for name, value in own.items() if value != getattr(untouched, name)}
    return {name: _plain(value, f"{where}.{name}") for name, value in said.items()}


def _plain(value: Any, where: str) -> Any:
    """A value as YAML has it."""
    if is_section(value):
        return changed(value, where)
    match value:
        case enum.Enum():
            return _plain(value.value, where)
        case Path():
            return str(value)
        case Mapping():
            check_keys(value, where)
            return {key: _plain(inner, f"{where}.{key}") for key, inner in value.items()}
        case list() | tuple():
            return [_plain(inner, where) for inner in value]
        case None | str() | int() | float():
            return value
    raise ConfigError(
        f"{where} is text, a number, true or false, None, a list, a dict or a section such as TrainingConfig(steps=2), "
        f"not {type(value).__name__}; code is given to tw.train or tw.evaluate itself"
    )


def place(tree: dict[str, Any], steps: list[str], folder: Path) -> None:
    """Make the value at `steps` absolute where it names a file beside the config file."""
    if steps[0] not in tree:
        return
    if len(steps) > 1 and isinstance(tree[steps[0]], dict):
        place(tree[steps[0]], steps[1:], folder)
    elif len(steps) == 1:
        tree[steps[0]] = _placed(tree[steps[0]], folder)


def _placed(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_placed(entry, folder) for entry in value]
    if isinstance(value, dict):
        return {key: _placed(entry, folder) for key, entry in value.items()}
    if not isinstance(value, str) or not ("/" in value or "." in value):
        return value
    file, colon, name = value.rpartition(":") if ".py:" in value else (value, "", "")
    path = folder / file
    return f"{path}{colon}{name}" if path.exists() else value
