"""Options of a plug-in, by the settings or parameters that it declares: strict, the first that is wrong is named."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError

from turnwise.config import Config
from turnwise.config.sections import value_of
from turnwise.errors import ConfigError, PluginError
from turnwise.errors.nearest_name import nearest, unknown
from turnwise.extensions import named
from turnwise.system.plugins import load

Settings = TypeVar("Settings")
_BY_NAME: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD


def read_settings(kind: type[Settings], values: Any, where: str) -> Settings:
    """Settings of a dataclass, or of a pydantic model that forbids others; ConfigError begins with `where`."""
    names = _names(kind)
    if isinstance(values, Mapping):
        for key in values:
            if key not in names:
                raise ConfigError(f"{where}: {unknown('option', str(key), names)}")
    try:
        adapter: TypeAdapter[Settings] = _adapter(kind)  # type: ignore[arg-type]  # a class is hashable
        settings = adapter.validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(map(str, first["loc"]))
        hint = f": {nearest(name, names)}" if first["type"] == "extra_forbidden" else ""
        raise ConfigError(
            f"{where}: {name + ': ' if name else ''}{first['msg'].removeprefix('Value error, ')}{hint}"
        ) from error
    return settings


def read_files(config: Config, kind: str) -> dict[str, Any]:
    """By name what files of the config name: `loop_files` or `user_files`, whose keys extensions have."""
    entries: dict[str, Any] = {}
    for key, reader in named(kind).items():
        if (file := value_of(config, key)) is not None:
            if not Path(file).is_file():
                raise ConfigError(f"{key}: no file {file} (from {Path.cwd()})")
            entries |= load(reader, kind)(config)
    return entries


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _names(kind: Any) -> list[str]:
    if issubclass(kind, BaseModel):
        return [field.alias or name for name, field in kind.model_fields.items()]
    return [field.name for field in dataclasses.fields(kind)]


def keyword_options(plugin: Callable[..., Any], options: Mapping[str, Any], who: str, where: str) -> dict[str, Any]:
    """The options of a function, by its keyword-only parameters, or of a class; as their annotations promise.

    Unknown, missing and ill-typed ones are refused: `who` is the plug-in in a message, `where` the config key.
    """
    parameters = inspect.signature(plugin).parameters
    kinds = {inspect.Parameter.KEYWORD_ONLY, *([_BY_NAME] if isinstance(plugin, type) else [])}
    declared = {name: parameter for name, parameter in parameters.items() if parameter.kind in kinds}
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        for name in options:
            if name not in declared:
                problem = unknown("option", name, declared) if declared else f"unknown option {name!r}: it takes none"
                raise ConfigError(f"{where}: {who}: {problem}")
    for name, parameter in declared.items():
        if parameter.default is parameter.empty and name not in options:
            raise ConfigError(f"{where}: {who} needs the option {name!r}")
    return _typed(plugin, options, who, where) if options else {}


def _typed(plugin: Any, options: Mapping[str, Any], who: str, where: str) -> dict[str, Any]:
    """The options as their annotations promise; one that is something else is refused."""
    function = vars(plugin).get("__init__", plugin) if isinstance(plugin, type) else plugin
    function = function if inspect.isroutine(function) or isinstance(function, type) else function.__call__
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise PluginError(f"{who}: cannot resolve its annotations: {error}") from error
    values = dict(options)
    for name in options:
        if name in hints:
            try:
                values[name] = TypeAdapter(hints[name]).validate_python(options[name], strict=True)
            except ValidationError as error:
                problem = error.errors()[0]["msg"]
                raise ConfigError(f"{where}: {who}: {name}={options[name]!r:.80} does not fit: {problem}") from error
    return values
