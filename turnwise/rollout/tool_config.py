"""The `config` of an entry in a file of tools, read into the settings that a tool declares."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel, ValidationError

from turnwise.errors import ConfigError, nearest
from turnwise.rollout.tools.tool import Tool

Settings = TypeVar("Settings", bound=BaseModel)


@runtime_checkable
class Configurable(Protocol):
    """A built-in tool that takes a `config`."""

    def configured(self, config: Mapping[str, Any], folder: Path) -> Tool:
        """The tool with these settings; files are named from `folder`. ConfigError for what is none."""
        ...


def read_settings(kind: type[Settings], values: Any, where: str) -> Settings:
    """Settings of a pydantic model that forbids others; ConfigError names the first that is wrong."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(map(str, first["loc"]))
        hint = f": {nearest(name, kind.model_fields)}" if first["type"] == "extra_forbidden" else ""
        raise ConfigError(f"{where}: {name + ': ' if name else ''}{first['msg']}{hint}") from error
