"""The config of a run as flat keys, and the keys in which runs differ."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from turnwise.errors import StorageError
from turnwise.storage.run_dir import CONFIG, RunDir

DEEPEST = 100
LONGEST = 1 << 20
_MOST_VALUES = 20_000


def read_config(run: RunDir) -> tuple[str, dict[str, str]]:
    """A run's config.yaml: its text, and `{"training.steps": "38", ...}`."""
    import yaml

    path = run.path / CONFIG
    is_long = path.is_file() and path.stat().st_size > 4 * LONGEST  # then it never comes into memory
    text = "" if is_long else run.read_text(CONFIG)
    if is_long or len(text) > LONGEST:
        raise StorageError(f"{path} has more than {LONGEST} characters; that is not a config")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it was built
    try:
        _refuse_depth(text, loader, path)
        tree = yaml.load(text, Loader=loader)
        if tree is not None and not isinstance(tree, dict):
            raise StorageError(f"{path} is not a tree of keys")
        return text, dict(_flatten(tree or {}, "", _Budget(path.name)))
    # a tag such as !!bool over nonsense makes the library fail in its own ways
    except (yaml.YAMLError, RecursionError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise StorageError(f"cannot read {path}: {error}") from error


def _refuse_depth(text: str, loader: Any, path: Path) -> None:
    """The quick loader builds a tree by calling itself in C, where nesting without end crashes the process."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > DEEPEST:
            raise StorageError(f"cannot read {path}: it is nested more than {DEEPEST} deep")


def diff(configs: Mapping[str, Mapping[str, str]]) -> list[dict[str, Any]]:
    """Keys in which runs differ, in the order of the first run; a run without the key has None."""
    keys = dict.fromkeys(key for values in configs.values() for key in values)
    rows = [(key, {name: values.get(key) for name, values in configs.items()}) for key in keys]
    return [{"key": key, "values": values} for key, values in rows if len(set(values.values())) > 1]


class _Budget:
    """How many values are left to visit: aliases make a small file a huge tree."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._left = _MOST_VALUES

    def take(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise StorageError(f"{self._name} has more than {_MOST_VALUES} values; that is not a config")


def _flatten(tree: dict[Any, Any], prefix: str, budget: _Budget) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            budget.take()
            yield from _flatten(value, f"{prefix}{key}.", budget)
        else:
            yield f"{prefix}{key}", _text(value, budget)


def _text(value: Any, budget: _Budget) -> str:
    """A value as YAML's flow style shows it."""
    budget.take()
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list():
            return "[" + ", ".join(_text(item, budget) for item in value) + "]"
        case dict():
            return "{" + ", ".join(f"{key}: {_text(item, budget)}" for key, item in value.items()) + "}"
        case _:
            return str(value)
