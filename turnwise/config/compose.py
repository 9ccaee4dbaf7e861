"""From the command line to a Config: defaults, the task's, the profile's, the user's file, then key=value overrides."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from turnwise.config import Config
from turnwise.config.brought_names import equivalent
from turnwise.config.check import COMMAND_LINE, DEFAULT, check_config
from turnwise.config.environment import fill_in
from turnwise.config.fitting import fitted
from turnwise.config.knobs import Knob, is_plugin, knobs_of
from turnwise.config.old_keys import GONE, answers_to_old, renamed, translated
from turnwise.config.override_text import Unreadable, read_override
from turnwise.config.sections import full_config, items
from turnwise.config.strict_yaml import read_yaml
from turnwise.config.trees import check_keys, flatten, over, place
from turnwise.errors import ConfigError, one_line
from turnwise.errors.nearest_name import MOST_MEANT, nearest, unknown
from turnwise.extensions import extensions

FILES = Path(__file__).parent / "files"
PROGRAM = "configure"
"""Where a value comes from that a program gives as it is."""
ENVIRONMENT = "environment"
"""The origin of a value from there, before the variable's name."""


@dataclass(frozen=True, slots=True)
class Composed:
    """A Config and, for every key, where its value comes from."""

    config: Config
    origins: dict[str, str]
    recorded: Path | None = None
    """The config of the run that is resumed."""
    beneath: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the task and the profile set, by section."""

    def values(self) -> dict[str, Any]:
        """The value of every key, by its dotted name."""
        return dict(items(self.config))


def compose_with(
    task_values: Callable[[str], Mapping[str, Any]],
    overrides: Sequence[str] = (),
    config_file: Path | None = None,
    *,
    recorded: Path | None = None,
    values: Mapping[str, Any] | None = None,
) -> Composed:
    """The config of a command (data/task_config.py adds what a task sets). Every mistake is a ConfigError with the
    nearest valid name; torch is not imported. `values` is a tree that a program gives beside the overrides.

    `recorded` is the config of a run that is resumed: what is not given anew stays as it was there. It names every key,
    so a task of the user's that only it names is not asked, and its file not run: somebody may have sent the run.
    """
    if isinstance(overrides, str) or not all(isinstance(text, str) for text in overrides):
        raise ConfigError("overrides are texts such as 'sampling.temperature=0', or dicts such as {'task': None}")
    knobs = knobs_of(full_config())
    from_run = {} if recorded is None else _read_file(recorded, knobs, of_a_run=True)
    anew = {} if config_file is None else _read_file(config_file, knobs)
    program = _checked(dict(values or {}), PROGRAM, knobs)
    anew = over(anew, program)
    from_file = over(from_run, anew)
    given = dict(_read_override(text, knobs) for text in overrides)
    if twice := sorted(flatten(program).keys() & given.keys()):
        raise ConfigError(f"{PROGRAM}: {twice[0]} is given twice")
    named = given.get("task", anew.get("task", DEFAULT))
    task = from_run.get("task", Config.task) if named is DEFAULT else named
    from_task = {}
    if task is not None and (named is not DEFAULT or not is_plugin(str(task))):
        from_task = _task_layer(str(task), task_values(str(task)), knobs)
    if any(key.partition(".scorers")[0] == "scoring" for key in (*flatten(from_file), *given)):
        from_task.get("scoring", {}).pop("scorers", None)  # the user's `default` must not lose to the task's own
    profile = given.get("profile", anew.get("profile"))
    if recorded is not None and profile not in (None, from_run.get("profile")):
        raise ConfigError(f"profile={profile}: a resumed run keeps its own keys; set only the keys to change")
    from_profile = {} if profile is None else _profile_layer(str(profile), knobs)
    beneath = over(from_task, from_profile)
    config = _laid_over(beneath, from_file, given, None if program else config_file or recorded)
    origins = dict.fromkeys(knobs, DEFAULT)
    origins |= {_knob_of(key, knobs): f"task {task}" for key in flatten(from_task)}
    origins |= {_knob_of(key, knobs): f"profile {profile}" for key in flatten(from_profile)}
    origins |= {_knob_of(key, knobs): str(recorded) for key in flatten(from_run)}
    origins |= {_knob_of(key, knobs): str(config_file) for key in flatten(anew)}
    origins |= {_knob_of(key, knobs): COMMAND_LINE for key in (*flatten(program), *given)}
    config, filled = fill_in(config, [key for key, origin in origins.items() if origin == DEFAULT])
    origins |= {key: f"{ENVIRONMENT} {variable}" for key, variable in filled.items()}
    check_config(config, origins)
    return Composed(config, origins, recorded, beneath)


def unread(composed: Composed) -> list[str]:
    """Keys somebody set to something new that this run will not read; each with the reason.

    Not those of a run that is resumed: they were read then, and are not asked for now.
    """
    values = composed.values()
    # A recorded config holds every key: most say nothing new.
    unset = dict(items(_laid_over(composed.beneath, {}, {}, None)))
    warnings = []
    for key, knob in knobs_of(full_config()).items():
        if knob.only is None or values[key] == unset[key] or composed.origins[key] == str(composed.recorded):
            continue
        if (why := knob.why_unread(values)) is not None:
            warnings.append(f"{key} ({composed.origins[key]}) is never read: {why}")
    for name in composed.config.eval.sampling:
        if (why := knobs_of(full_config())[f"sampling.{name}"].why_unread(values)) is not None:
            warnings.append(f"eval.sampling.{name} ({composed.origins['eval.sampling']}) is never read: {why}")
    return warnings


def other_names() -> dict[str, str]:
    """What stands here for keys of other systems, and for keys that had another name."""
    answers: dict[str, str] = {}
    for extension in extensions().values():
        if extension.keys is not None:
            package, _, name = extension.keys.partition(":")
            answers |= read_yaml(Path(str(resources.files(package) / name)))
    return {**answers, **GONE, **renamed()}


# --- reading ------------------------------------------------------------------------------------------------------


def _read_override(text: str, knobs: Mapping[str, Knob]) -> tuple[str, Any]:
    """The key and the value of `key=value`, both checked."""
    if text.startswith(("-", "=")) or "=" not in text:
        raise ConfigError(f"cannot read {text!r}: write key=value, such as sampling.temperature=0.7")
    try:
        override = read_override(text)
    except (Unreadable, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"cannot read {text!r}: {problem} (quote special characters)") from error
    key, value = _shorthand(override.key, knobs), override.value
    knob = knobs.get(_known_key(key, knobs, COMMAND_LINE))
    if knob is not None and isinstance(value, int | float) and (knob.hint is str or knob.is_list):
        value = override.written  # engine.model=0.10 means these letters, not a number
    _check_given(key, value, knob, COMMAND_LINE)
    if knob is not None and knob.is_list and value is not None and not isinstance(value, list | dict):
        value = [value] if override.written.strip() else []  # data.eval_files=test.parquet means a list of one
    return key, value


def _check_given(key: str, value: Any, knob: Knob | None, where: str) -> None:
    """What would be taken for something else than was written, and choices nobody offers."""
    if any("${" in text or text == "???" for text in (key, *_texts(value))):
        raise ConfigError(f"{where}: {key}: ${{...}} and ??? are not filled in here: write the value itself")
    if knob is None or value is None:
        return
    entries = value if isinstance(value, list) else [value]
    is_name = knob.hint is str and not knob.choices
    if (is_name or knob.is_list) and any(isinstance(entry, bool | float) for entry in entries):
        raise ConfigError(f"{where}: {key} is text: put quotes around {value}")
    if knob.hint is bool and not isinstance(value, bool) and str(value).lower() not in ("yes", "no", "on", "off"):
        raise ConfigError(f"{where}: {key} is true or false, not {value}")
    own = knob.takes_plugin and isinstance(value, str) and is_plugin(value)
    if knob.choices and str(value) not in knob.choices and not own:
        offered = ", ".join(knob.choices)
        raise ConfigError(f"{where}: {key} is one of {offered}: {unknown('choice', str(value), knob.choices)}")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield str(value)
    elif isinstance(value, dict):
        for name, entry in value.items():
            yield from (str(name), *_texts(entry))
    elif isinstance(value, list):
        for entry in value:
            yield from _texts(entry)


def _known_key(key: str, knobs: Mapping[str, Knob], where: str) -> str:
    """The schema key of `key`, which may lie inside a dict knob; anything else is an error."""
    knob = _knob_of(key, knobs)
    if knob in knobs:
        return knob
    if (new := renamed().get(key)) is not None:
        raise ConfigError(f"{where}: {key!r} is called {new} now")
    if any(name.startswith(key + ".") for name in knobs):
        raise ConfigError(f"{where}: {key!r} is a section; set its keys one by one, such as {_under(key, knobs)[0]}")
    names = other_names()
    if (ours := names.get(key, equivalent(key, knobs))) is not None:
        raise ConfigError(f"{where}: unknown key {key!r}; its equivalent here: {ours}")
    known = any(name.endswith(f".{key}") for name in knobs)
    if not known and (same := sorted({here for name, here in names.items() if name.endswith(f".{key}")})):
        raise ConfigError(f"{where}: unknown key {key!r}; its equivalent here: {' or '.join(same[:MOST_MEANT])}")
    raise ConfigError(f"{where}: {unknown('key', key, knobs)}")


def _shorthand(key: str, knobs: Mapping[str, Knob]) -> str:
    """`engine=openai` means `engine.name=openai`."""
    return f"{key}.name" if f"{key}.name" in knobs else key


def _under(section: str, knobs: Mapping[str, Knob]) -> list[str]:
    return [name for name in knobs if name.startswith(section + ".")]


def _knob_of(key: str, knobs: Mapping[str, Knob]) -> str:
    """The dict knob that holds `key`, or the key itself."""
    return next((name for name, knob in knobs.items() if knob.is_dict and key.startswith(name + ".")), key)


def _read_file(path: Path, knobs: Mapping[str, Knob], *, of_a_run: bool = False) -> dict[str, Any]:
    """The tree of a file; one that a run has kept may have names of earlier versions."""
    try:
        is_file = path.is_file()
    except (OSError, ValueError) as error:  # a name that is too long, or has a null character
        raise ConfigError(f"--config: {one_line(error)}") from error
    if not is_file:
        folder = path.parent if path.parent.is_dir() else Path()
        names = [entry.name for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml")]
        hint = nearest(path.name, names) if names else "there is no YAML file there"
        raise ConfigError(f"no config file {path} (from {Path.cwd()}): {hint}")
    content = read_yaml(path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values")
    check_keys(content, path)
    content = _checked(translated(content) if of_a_run else content, str(path), knobs)
    for key in (name for name, knob in knobs.items() if knob.is_path):
        place(content, key.split("."), path.resolve().parent)
    return content


def _checked(content: dict[str, Any], where: str, knobs: Mapping[str, Knob]) -> dict[str, Any]:
    """The tree with every key and value known; ConfigError for the first that is not."""
    content = {
        key: {"name": value} if isinstance(value, str) and _shorthand(str(key), knobs) != key else value
        for key, value in content.items()
    }
    values = flatten(content)
    if answers := answers_to_old(values):
        raise ConfigError(f"{where}: {answers}")
    for key, value in values.items():
        if key in knobs or not any(name.startswith(key + ".") for name in knobs):
            _check_given(key, value, knobs.get(_known_key(key, knobs, where)), where)
        elif value is not None:
            _known_key(key, knobs, where)  # which is no key: it says what to write instead
    return content


def _task_layer(task: str, values: Mapping[str, Any], knobs: Mapping[str, Knob]) -> dict[str, Any]:
    """What the task sets, by section."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        _check_given(key, value, knobs.get(_known_key(key, knobs, f"task {task}")), f"task {task}")
        *sections, name = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return tree


def _profile_layer(profile: str, knobs: Mapping[str, Knob]) -> dict[str, Any]:
    """What a profile sets: one of ours by its name, or a file. It says how to run, never what."""
    ours = {entry.stem: entry for entry in (FILES / "profiles").glob("*.yaml")}
    if profile not in ours and not profile.endswith((".yaml", ".yml")):
        raise ConfigError(f"{unknown('profile', profile, ours)} Your own is a YAML file: profile=FILE.yaml")
    path = ours.get(profile, Path(profile))
    settings = _read_file(path, knobs)
    if what := [key for key in ("task", "run", "resume", "profile") if key in settings]:
        raise ConfigError(f"{path}: a profile says how to run, not what: take {', '.join(what)} out of it")
    return settings


def _laid_over(
    beneath: dict[str, Any], from_file: dict[str, Any], given: Mapping[str, Any], config_file: Path | None
) -> Config:
    """The defaults with each layer on top; a later key of the command line may lie inside the value of an earlier."""
    config = fitted(full_config()(), beneath, "the profile's or the task's defaults: ")
    config = fitted(config, from_file, "" if config_file is None else f"{config_file}: ")
    for key, value in given.items():
        for name in reversed(key.split(".")):
            value = {name: value}
        config = fitted(config, value)
    return config
