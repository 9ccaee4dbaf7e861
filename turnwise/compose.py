"""From the command line to a Config: defaults, then the task's, then the user's file, then key=value overrides."""

import dataclasses
import enum
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from turnwise.choices import SandboxLevel
from turnwise.config import Config
from turnwise.errors import ConfigError, nearest, unknown
from turnwise.plugins import names_in

TASKS_PACKAGE = "turnwise.tasks"
INPUTS = (
    "task", "model.path", "chat.template", "data.train_files", "data.eval_files", "rollout.agent", "rollout.tools",
    "rollout.interaction", "rollout.interactions_file", "scoring.scorers", "sft.script", "sft.recorded",
)  # fmt: skip
"""Keys that name something to read; in a config file such a path may be relative to that file."""
DEFAULT, COMMAND_LINE = "default", "command line"


@dataclass(frozen=True, slots=True)
class Composed:
    """A Config and, for every key, where its value comes from."""

    config: Config
    origins: dict[str, str]
    recorded: Path | None = None
    """The config of the run that this one goes on from."""

    def values(self) -> dict[str, Any]:
        """Every key with its value."""
        return dict(_flatten_config(self.config))


@dataclass(frozen=True, slots=True)
class _Knob:
    """What the schema knows of one key."""

    hint: Any
    only: tuple[str, tuple[str, ...]] | None

    @property
    def is_dict(self) -> bool:
        return typing.get_origin(self.hint) is dict

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.hint) is list


def compose(
    overrides: Sequence[str] = (), config_file: Path | None = None, *, recorded: Path | None = None
) -> Composed:
    """The config of a command. Every mistake is a ConfigError with the nearest valid name; torch is not imported.

    `recorded` is the config of a run that goes on: what is not given anew stays as it was there.
    """
    knobs = dict(_knobs(Config))
    from_run = {} if recorded is None else _read_file(recorded, knobs)
    anew = {} if config_file is None else _read_file(config_file, knobs)
    from_file = _over(from_run, anew)
    given = [_read_override(text, knobs) for text in overrides]
    on_line = {key: text for key, text, _ in given}
    task = next((value for key, _, value in reversed(given) if key == "task"), from_file.get("task", Config.task))
    layers, from_task = _task_layer(task)
    config = _hydra(layers, from_file, list(on_line.values()), config_file or recorded)
    origins = dict.fromkeys(knobs, DEFAULT)
    origins |= {_knob_of(key, knobs): f"task {task}" for key in from_task}
    origins |= {_knob_of(key, knobs): str(recorded) for key in _flatten(from_run)}
    origins |= {_knob_of(key, knobs): str(config_file) for key in _flatten(anew)}
    origins |= {_knob_of(key, knobs): COMMAND_LINE for key in on_line}
    composed = Composed(config, origins, recorded)
    _check_values(config)
    return composed


def configure(*overrides: str, config_file: Path | None = None) -> Config:
    """The Config of key=value overrides, for Python: `configure("task=null", "sampling.temperature=0")`."""
    return compose(overrides, config_file).config


def unread(composed: Composed) -> list[str]:
    """Keys somebody set to something new that this run will not read; each with the reason.

    Not those of a run that goes on: they were read then, and are not asked for now.
    """
    values = composed.values()
    layers, _ = _task_layer(composed.config.task)
    unset = dict(
        _flatten_config(_hydra(layers, {}, [], None))
    )  # a recorded config holds every key: most say nothing new
    found = []
    for key, knob in _knobs(Config):
        if knob.only is None or values[key] == unset[key] or composed.origins[key] == str(composed.recorded):
            continue
        other, wanted = knob.only
        value = values[other]
        shown = value.value if isinstance(value, enum.Enum) else value
        if not value if wanted == ("*",) else str(shown) not in wanted:
            when = "set" if wanted == ("*",) else " or ".join(wanted)
            found.append(
                f"{key} ({composed.origins[key]}) is never read: {other} is {shown}; it is read when that is {when}"
            )
    return found


def flat(config: Config) -> dict[str, Any]:
    """Every key with its value as YAML would write it, for those who keep a table of settings."""
    return {
        key: value.value if isinstance(value, enum.Enum) else value
        for key, value in dict(_flatten_config(config)).items()
    }


def differences(config_file: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Keys whose value in a recorded config is another than now: {key: (then, now)}."""
    then, now = dict(_flatten_config(compose([], config_file).config)), dict(_flatten_config(config))
    return {key: (then[key], now[key]) for key in now if then[key] != now[key]}


def to_yaml(config: Config) -> str:
    """The whole tree as YAML that `--config` reads back."""

    def plain(value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return value.value
        return {key: plain(entry) for key, entry in value.items()} if isinstance(value, dict) else value

    return yaml.safe_dump(plain(dataclasses.asdict(config)), sort_keys=False, allow_unicode=True)


# --- reading ------------------------------------------------------------------------------------------------------


def _read_override(text: str, knobs: Mapping[str, _Knob]) -> tuple[str, str, Any]:
    """(key, the override as Hydra shall read it, its value)."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if text.startswith("-") or "=" not in text:
        raise ConfigError(f"cannot read {text!r}: write key=value, such as sampling.temperature=0.7")
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(f"cannot read {text!r}: {str(error).splitlines()[0]} (quote special characters)") from error
    key = _shorthand(override.key_or_group, knobs)
    if override.is_delete() or override.is_sweep_override() or override.package:
        raise ConfigError(f"cannot use {text!r}: only key=value is supported")
    knob = knobs.get(_known_key(key, knobs, COMMAND_LINE))
    value = override.value()
    element = override.get_value_element_as_str()
    if knob is not None and knob.is_list and not isinstance(value, list | dict):
        element = f"[{element}]"  # data.eval_files=test.parquet means a list of one
    return key, f"++{key}={element}", value


def _known_key(key: str, knobs: Mapping[str, _Knob], where: str) -> str:
    """The schema key of `key`, which may lie inside a dict knob; anything else is an error."""
    knob = _knob_of(key, knobs)
    if knob in knobs:
        return knob
    if any(name.startswith(key + ".") for name in knobs):
        raise ConfigError(f"{where}: {key!r} is a section; set one of its keys: {nearest(key, _under(key, knobs))}")
    known = yaml.safe_load((Path(__file__).parent / "conf" / "verl_keys.yaml").read_text(encoding="utf-8"))
    if key in known:
        raise ConfigError(f"{where}: unknown key {key!r}: what stands for it here is {known[key]}")
    raise ConfigError(f"{where}: {unknown('key', key, knobs)}")


def _shorthand(key: str, knobs: Mapping[str, _Knob]) -> str:
    """`engine=openai` means `engine.name=openai`."""
    return f"{key}.name" if f"{key}.name" in knobs else key


def _under(section: str, knobs: Mapping[str, _Knob]) -> list[str]:
    return [name for name in knobs if name.startswith(section + ".")]


def _knob_of(key: str, knobs: Mapping[str, _Knob]) -> str:
    """The dict knob that holds `key`, or the key itself."""
    return next((name for name, knob in knobs.items() if knob.is_dict and key.startswith(name + ".")), key)


def _read_file(path: Path, knobs: Mapping[str, _Knob]) -> dict[str, Any]:
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path()
        names = [entry.name for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml")]
        raise ConfigError(f"no config file {path} (from {Path.cwd()}): {nearest(path.name, names)}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values")
    content = {
        key: {"name": value} if isinstance(value, str) and _shorthand(str(key), knobs) != key else value
        for key, value in content.items()
    }
    for key, value in _flatten(content).items():
        if key in knobs or not any(name.startswith(key + ".") for name in knobs):
            _known_key(key, knobs, str(path))
        elif value is not None:
            raise ConfigError(f"{path}: {key!r} is a section; set one of its keys: {nearest(key, _under(key, knobs))}")
    for key in INPUTS:
        _place(content, key.split("."), path.resolve().parent)
    return content


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Two trees as one; where both say something, it is what `above` says."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(key), dict)
        merged[key] = _over(below[key], value) if both else value
    return merged


def _place(tree: dict[str, Any], steps: list[str], folder: Path) -> None:
    """Make the value at `steps` absolute where it names a file beside the config file."""
    if steps[0] not in tree:
        return
    if len(steps) > 1 and isinstance(tree[steps[0]], dict):
        _place(tree[steps[0]], steps[1:], folder)
    elif len(steps) == 1:
        tree[steps[0]] = _placed(tree[steps[0]], folder)


def _placed(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_placed(entry, folder) for entry in value]
    if isinstance(value, dict):
        return {key: _placed(entry, folder) for key, entry in value.items()}
    if not isinstance(value, str) or not ("/" in value or "." in value):
        return value
    place, colon, name = value.rpartition(":") if ".py:" in value else (value, "", "")
    found = folder / place
    return f"{found}{colon}{name}" if found.exists() else value


def _task_layer(task: Any) -> tuple[list[str], list[str]]:
    """(Hydra overrides that add the task's defaults, the keys they set)."""
    if task is None:
        return [], []
    names = [name for name in names_in(TASKS_PACKAGE) if not name.endswith("_traces")]
    if not isinstance(task, str) or (task not in names and ":" not in task):
        raise ConfigError(unknown("task", str(task), names) + " Your own is written as file.py:rows.")
    defaults = Path(__file__).parent / "conf" / "task_defaults" / f"{task}.yaml"
    if not defaults.is_file():
        return [], []
    return [f"+task_defaults={task}"], list(_flatten(yaml.safe_load(defaults.read_text(encoding="utf-8"))))


def _hydra(layers: list[str], from_file: dict[str, Any], overrides: list[str], config_file: Path | None) -> Config:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    if from_file:
        store.store(group="user_file", name="given", node=from_file, package="_global_")
        layers = [*layers, "+user_file=given"]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("turnwise.conf", version_base="1.3"):
            composed = hydra_compose("config", overrides=[*layers, *overrides])
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_readable(error, config_file)) from error
    if not isinstance(config, Config):
        raise TypeError(f"Hydra made a {type(config).__name__}")
    return config


def _readable(error: Exception, config_file: Path | None) -> str:
    """Hydra's and OmegaConf's errors as one sentence with the key."""
    chain = [error]
    while chain[-1].__cause__ is not None and isinstance(chain[-1].__cause__, Exception):
        chain.append(chain[-1].__cause__)
    lines = [line.strip() for link in reversed(chain) for line in str(link).splitlines()]
    key = next((line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")), "")
    where = f"{config_file}: " if any(line.startswith("In 'user_file/given'") for line in lines) else ""
    telling = next((line for line in lines if line and not line.startswith(("In '", "Error merging"))), lines[0])
    return where + (f"{key}: {telling}" if key and key not in telling else telling)


# --- the schema ---------------------------------------------------------------------------------------------------


def _knobs(section: type, prefix: str = "") -> Iterator[tuple[str, _Knob]]:
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _knobs(hint, f"{prefix}{field.name}.")
            continue
        if typing.get_origin(hint) is types.UnionType:
            hint = next(part for part in typing.get_args(hint) if part is not type(None))
        yield prefix + field.name, _Knob(hint, field.metadata.get("only"))


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _flatten_config(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _flatten_config(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def _check_values(config: Config) -> None:
    """Ranges a type cannot say."""
    values = dict(_flatten_config(config))
    for key, value in values.items():
        if isinstance(value, list) and not all(isinstance(entry, str) for entry in value):
            raise ConfigError(f"{key} must be a list of texts, not {value}")
    at_least = {
        "sampling.temperature": 0, "sampling.top_k": 0, "sampling.max_tokens": 1, "eval.group_size": 1,
        "eval.samples": 1, "engine.max_batch": 1, "engine.threads": 0, "engine.retries": 0, "data.max_prompt_tokens": 1,
        "rollout.max_assistant_turns": 1, "rollout.max_user_turns": 0, "rollout.max_parallel_calls": 1,
        "rollout.max_malformed_calls": 1, "rollout.max_tokens": 1, "rollout.max_tool_reply_chars": 1,
        "rollout.concurrency": 1, "sandbox.memory_mb": 1, "sandbox.scratch_mb": 1, "sandbox.warm": 0,
        "scoring.workers": 0, "scoring.retries": 0, "scoring.batch_size": 1, "sft.steps": 1, "sft.batch_tokens": 1,
        "sft.warmup": 0,
    }  # fmt: skip
    for key, least in at_least.items():
        if values[key] is not None and values[key] < least:
            raise ConfigError(f"{key} must be at least {least}, not {values[key]}")
    positive = ("rollout.max_seconds", "rollout.tool_timeout", "engine.timeout_seconds", "sft.lr")
    for key in (*positive, "sandbox.seconds", "scoring.timeout"):
        if values[key] is not None and not values[key] > 0:
            raise ConfigError(f"{key} must be more than 0, not {values[key]}")
    if not 0 < config.sampling.top_p <= 1:
        raise ConfigError(f"sampling.top_p must be above 0 and at most 1, not {config.sampling.top_p}")
    if not 0 <= config.rollout.max_failures <= 1:
        raise ConfigError(f"rollout.max_failures is a share from 0 to 1, not {config.rollout.max_failures}")
    if config.sandbox.min_level is SandboxLevel.auto:
        raise ConfigError("sandbox.min_level is a level (L0, L2, L3 or L4); auto is for sandbox.level")
    if not 0 <= config.scoring.max_failures <= 1:
        raise ConfigError(f"scoring.max_failures is a share from 0 to 1, not {config.scoring.max_failures}")
