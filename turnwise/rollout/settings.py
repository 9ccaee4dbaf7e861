"""Options of a plug-in as the settings that it declares: strict, and the first that is wrong is named."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel, TypeAdapter, ValidationError

from turnwise.errors import ConfigError, nearest, unknown
from turnwise.rollout.tools.tool import Tool

Settings = TypeVar("Settings")


@runtime_checkable
class Configurable(Protocol):
    """A built-in tool that takes the `config` of its entry in a file of tools."""

    def configured(self, config: Mapping[str, Any], folder: Path) -> Tool:
        """The tool with these settings; files are named from `folder`. ConfigError for what is none."""
        ...


def read_settings(kind: type[Settings], values: Any, where: str) -> Settings:
    """Settings of a dataclass, or of a pydantic model that forbids others; ConfigError begins with `where`."""
    names = _names(kind)
    if isinstance(values, Mapping):
        for key in values:
            if key not in names:
                raise ConfigError(f"{where}: {unknown('option', str(key), names)}")
    try:
        adapter: TypeAdapter[Settings] = _adapter(kind)  # type: ignore[arg-type]  # a class is hashable
        made = adapter.validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(map(str, first["loc"]))
        hint = f": {nearest(name, names)}" if first["type"] == "extra_forbidden" else ""
        raise ConfigError(
            f"{where}: {name + ': ' if name else ''}{first['msg'].removeprefix('Value error, ')}{hint}"
        ) from error
    return made


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _names(kind: Any) -> list[str]:
    if issubclass(kind, BaseModel):
        return [field.alias or name for name, field in kind.model_fields.items()]
    return [field.name for field in dataclasses.fields(kind)]
