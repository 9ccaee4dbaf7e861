"""YAML as people mean it: no key twice, no bombs, and only true and false are truth values."""

import re
from pathlib import Path
from typing import Any

import yaml

from turnwise.errors import ConfigError

MOST_BYTES = 1_000_000
MOST_VALUES = 100_000
_TAG = "tag:yaml.org,2002:"


class _Dumper(yaml.SafeDumper):
    """Puts quotes around text that either YAML would read as something else."""


class _Loader(yaml.SafeLoader):
    """Reads plain words as YAML 1.2 and the command line do.

    YAML 1.1 makes a truth value of `no`, 8 of `010`, 90 of `1:30`, a date of `2026-01-01` and text of `1e-5`.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012  as PyYAML declares it

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping; a key that stands twice is a mistake, and the first would be lost."""
        own = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != f"{_TAG}merge"]
        for at, key in enumerate(own):
            if key in own[:at]:
                line = node.value[at][0].start_mark.line + 1
                raise yaml.YAMLError(f"the key {key!r} appears twice, again in line {line}")
        return super().construct_mapping(node, deep)


for _name, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", r"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
    ("merge", r"<<", "<"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
):  # fmt: skip
    _Loader.add_implicit_resolver(f"{_TAG}{_name}", re.compile(rf"^(?:{_pattern})$"), list(_first))
    _Dumper.add_implicit_resolver(f"{_TAG}{_name}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def write_yaml(value: Any) -> str:
    """Text that `parse_yaml` reads back as the same value."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def read_yaml(path: Path) -> Any:
    """What a file holds; ConfigError names the file and what is wrong with it."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{path}: more than {MOST_BYTES} bytes; that is not a config")
    try:
        return parse_yaml(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_yaml(text: str) -> Any:
    """What a text holds; ConfigError in one line."""
    try:
        content = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        position = f" (line {error.problem_mark.line + 1})" if error.problem_mark is not None else ""
        raise ConfigError(f"not YAML: {error.problem}{position}") from error
    except RecursionError as error:
        raise ConfigError("not YAML that can be read: nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number with more digits than Python reads
        raise ConfigError(f"not YAML: {' '.join(str(error).split())}") from error
    _check_content(content)
    return content


def _check_content(content: Any) -> None:
    """Plain values only, and not too many: aliases of aliases make a small file huge, one of itself endless."""
    waiting, count = [content], 0
    while waiting:
        value = waiting.pop()
        count += 1
        if count > MOST_VALUES:
            raise ConfigError(f"holds more than {MOST_VALUES} values, or an alias of itself")
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif not isinstance(value, str | int | float | None):
            raise ConfigError(f"holds a {type(value).__name__}; values are texts, numbers, true, false, null")
