"""The whole tree: the core's config, and for every extension that has options a section called like it; written out."""

import dataclasses
import enum
import functools
from collections.abc import Iterator
from importlib import import_module
from typing import Any, TypeVar, cast

from turnwise.config import Config
from turnwise.config.knobs import Knob, knobs_of
from turnwise.config.strict_yaml import write_yaml
from turnwise.errors import ConfigError
from turnwise.extensions import extensions

S = TypeVar("S")
TREE = "FullConfig"


@functools.cache
def extension_sections() -> dict[str, type]:
    """The dataclass of every extension's section, by the extension's name."""
    sections = {}
    core = {field.name for field in dataclasses.fields(Config)}
    for name, extension in extensions().items():
        if extension.section is None:
            continue
        module, _, attribute = extension.section.partition(":")
        try:
            kind = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"the extension {name}: its section {extension.section} is not there: {error}") from error
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            raise ConfigError(f"the extension {name}: its section {extension.section} is not a dataclass")
        if name in core:
            raise ConfigError(f"the extension {name}: a section cannot be called like the core's key {name!r}")
        sections[name] = kind
    return sections


@functools.cache
def full_config() -> type[Config]:
    """Config with a field for every section: the type of what `compose` makes."""
    fields = [(name, kind, dataclasses.field(default_factory=kind)) for name, kind in extension_sections().items()]
    tree = dataclasses.make_dataclass(TREE, fields, bases=(Config,))
    tree.__module__, tree.__doc__ = __name__, Config.__doc__  # pickle finds it by its module, in other processes too
    return cast(type[Config], tree)


def __getattr__(name: str) -> Any:
    if name == TREE:
        return full_config()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def knob_for(key: str) -> Knob | None:
    """The knob of a key, which may lie inside a mapping or a list; None for a key of no knob."""
    knobs = knobs_of(full_config())
    while key and key not in knobs:
        key = key.rpartition(".")[0]
    return knobs.get(key)


def section(config: Config, kind: type[S]) -> S:
    """An extension's section of a config; its defaults in a Config made by hand, which has none."""
    value = getattr(config, _name_of(kind), None)
    return kind() if value is None else cast(S, value)


def with_section(config: Config, value: Any) -> Config:
    """The config with another section of an extension."""
    changed: dict[str, Any] = {_name_of(type(value)): value}
    return dataclasses.replace(complete(config), **changed)


def complete(config: Config) -> Config:
    """The same config with every section."""
    tree = full_config()
    if isinstance(config, tree):
        return config
    return tree(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


def value_of(config: Config, key: str) -> Any:
    """The value of a key, of an extension's section too."""
    return functools.reduce(getattr, key.split("."), complete(config))


def with_value(config: Config, key: str, value: Any) -> Config:
    """The config with another value of a key `section.name`."""
    section, _, name = key.partition(".")
    inner = dataclasses.replace(value_of(config, section), **{name: value})
    changed: dict[str, Any] = {section: inner}
    return dataclasses.replace(complete(config), **changed)


def _name_of(kind: type) -> str:
    name = next((name for name, each in extension_sections().items() if each is kind), None)
    if name is None:
        raise ConfigError(
            f"{kind.__name__} is not a section of an extension: the table has {', '.join(extension_sections())}"
        )
    return name


def flat(config: Config) -> dict[str, Any]:
    """Every key with its value as YAML would write it, for those who keep a table of settings."""
    return {key: value.value if isinstance(value, enum.Enum) else value for key, value in items(complete(config))}


def to_yaml(config: Config) -> str:
    """The whole tree as YAML that `--config` reads back."""

    def plain(value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return value.value
        return {key: plain(entry) for key, entry in value.items()} if isinstance(value, dict) else value

    return write_yaml(plain(dataclasses.asdict(complete(config))))


def items(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its value."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from items(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value
