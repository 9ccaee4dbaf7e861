"""verl's YAML files of agent loops: a list of {name, _target_, ...options}."""

from difflib import get_close_matches
from pathlib import Path

from turnwise.config.strict_yaml import read_yaml
from turnwise.errors import ConfigError
from turnwise.rollout.loops.loading import LoopEntry

TARGET = "_target_"


def read_agents(path: Path) -> dict[str, LoopEntry]:
    """Loops by name."""
    content = read_yaml(path)
    if not isinstance(content, list) or not content:
        raise ConfigError(f"{path}: expected a non-empty list of agent loops, each with a name and a {TARGET}")
    entries: dict[str, LoopEntry] = {}
    for number, item in enumerate(content):
        where = f"{path}[{number}]"
        if not isinstance(item, dict) or not all(isinstance(key, str) for key in item):
            raise ConfigError(f"{where}: expected a mapping with a name and a {TARGET}")
        options = dict(item)
        name, target = options.pop("name", None), options.pop(TARGET, None)
        for key, value in (("name", name), (TARGET, target)):
            if value is None:
                close = next((f", not {near}" for near in get_close_matches(key, options)), "")
                raise ConfigError(f"{where}: it needs {key}{close}")
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{where}: {key} must be text, not {value!r:.80}")
        if name in entries:
            raise ConfigError(f"{where}: the name {name!r} is taken")
        entries[name] = LoopEntry(target, options, where, path.resolve().parent)
    return entries
