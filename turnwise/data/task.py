"""What a task is: rows, tools, an interaction, a reward, metrics and config values, in one object of one file.

Built-in tasks (`turnwise/data/tasks`, one file each, which sets TASK) and users' own (`task=my_task.py`) are the same
type and are read the same way; nothing elsewhere asks which task it is. docs/tasks.md shows how to write one.
"""

import argparse
import enum
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from turnwise.config.environment import data_folder
from turnwise.errors import ConfigError, DataError, PluginError
from turnwise.errors.nearest_name import unknown
from turnwise.extensions import named
from turnwise.system.metrics import Reduction
from turnwise.system.plugins import call, load, names_in
from turnwise.types import JsonSchema, Message, Sample, Trajectory

PACKAGE = "turnwise.data.tasks"
ATTRIBUTE = "TASK"
"""What a file calls its task when the spec names none."""
FAMILY = "*"
"""How a name in the table of extensions ends that makes a task of whatever follows it."""


class NamedTool(Protocol):
    """A tool that is an object: what a row and the model call it, beside what rollout.tools asks of it."""

    @property
    def name(self) -> str: ...


class ScriptedTurn(Protocol):
    """What a script sees of the turn it speaks in; engines/samplers/scripted.py has the whole of it."""

    @property
    def noise(self) -> Any:
        """Whose turn it is: `seed`, `sample`, `sibling`."""

    @property
    def turn(self) -> int: ...

    @property
    def text(self) -> str:
        """Everything said so far."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The same as messages, the prompt's first."""

    @property
    def sample(self) -> Sample:
        """The row that is played, with its ground truth."""

    @property
    def tools(self) -> tuple[JsonSchema, ...]:
        """The schemas of the tools that are offered."""

    @property
    def call_format(self) -> Any:
        """How calls and thoughts are written: `render_call(call)`."""

    def call(self, name: str, **arguments: Any) -> str:
        """The text of a call, in the format of the model."""


Script = Callable[[ScriptedTurn], str]
"""What an assistant says in a turn, without a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task: `TASK = Task(name="shop", rows=rows, tools=[price, calculate], scorer=correct)`.

    Tools, interaction, scorer and script are names, as in a config, or objects of the task's own file. All of them are
    defaults of config keys: `turnwise check` shows them, and what the user sets stands instead.
    """

    name: str
    data_source: str = ""
    """Of its rows, where they name none; empty takes the name. Scorer and metrics belong to it."""
    further_sources: Sequence[str] = ()
    """Other data sources of its rows, such as one for each kind of question; scorer and metrics are theirs too."""
    rows: Callable[[str, int], Iterable[Mapping[str, Any]]] | None = None
    """`rows(split, seed)` gives dicts: `prompt`, and as needed `reward_model`, `extra_info` and other columns; split is
    "train" or "test". None for a task that reads prepared files."""
    endless: bool = False
    """Whether `rows` never ends, so that a number of samples must be given."""
    prepare: Callable[..., Mapping[Path, int]] | None = None
    """`prepare(out, *, option=default)` writes files into a folder and gives the rows of each; `turnwise prepare` runs
    it, with its keyword arguments as options: text, a number or an enum, `Annotated[..., "help"]`."""
    tools: Sequence[str | NamedTool | Callable[..., Any]] = ()
    """For rollout.tools."""
    interaction: str | Callable[..., Any] | None = None
    """For rollout.interaction: the simulated user, `async def user(turn)` or a class."""
    scorer: str | Callable[..., Any] | None = None
    """What its trajectories are worth, unless scoring.scorers says otherwise."""
    reductions: Mapping[str, Reduction] = field(default_factory=dict)
    """The metrics it declares, and how the values of many trajectories become one."""
    metrics: Callable[[Trajectory], Mapping[str, float]] | None = None
    """Their values in one trajectory; names that say nothing about it are left out."""
    script: str | Callable[[int], Callable[[Any], str]] | None = None
    """For sft.script: traces to learn from before RL."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Further config values by key: {"sampling.max_tokens": 96}."""

    @property
    def source(self) -> str:
        """The data source of its rows: its own, or else the task's name."""
        return self.data_source or self.name

    @property
    def sources(self) -> tuple[str, ...]:
        """All data sources that its scorer and its metrics belong to."""
        return (self.source, *self.further_sources)


def load_task(spec: str) -> Task:
    """The task of a built-in name, of `file.py` or `module` (its TASK), or of `file.py:NAME` and `module:NAME`.

    A function instead of a Task is taken for `rows`. An extension may bring whole families of tasks (`verifiers:ENV`).
    """
    brought = named("tasks", names_in(PACKAGE))
    for family, place in brought.items():
        prefix = family.removesuffix(FAMILY)
        if prefix != family and spec.startswith(prefix) and spec != prefix:
            return _checked(load(place, "task")(spec.removeprefix(prefix)), spec)
    if not is_own(spec):
        names = builtin_tasks()
        if spec not in names:
            raise ConfigError(f"{unknown('task', spec, names)} Your own is written as my_task.py.")
        return _checked(load(brought.get(spec, f"{PACKAGE}.{spec}:{ATTRIBUTE}"), "task"), spec)
    value = load(spec if ":" in spec else f"{spec}:{ATTRIBUTE}", "task")
    if isinstance(value, Task):
        return _checked(value, spec)
    if not callable(value):
        raise PluginError(f"task {spec!r} is a {type(value).__name__}, neither a Task nor a function that gives rows")
    if hasattr(sys.modules[value.__module__], "METRICS"):
        raise PluginError(f"task {spec!r}: METRICS of a module is not read; name reductions and metrics in a Task")
    return Task(name="", rows=value)


def is_own(spec: str) -> bool:
    """Whether a task is the user's, whose file must be run to know it."""
    return ":" in spec or "." in spec


def builtin_tasks() -> list[str]:
    """The built-in tasks: the folder is the registry."""
    return sorted({*names_in(PACKAGE), *(name for name in named("tasks") if not name.endswith(FAMILY))})


def known_scorers() -> dict[str, str]:
    """The scorers of the built-in tasks by data source, wherever rows of theirs turn up."""
    tasks = map(load_task, builtin_tasks())
    return {source: task.scorer for task in tasks if isinstance(task.scorer, str) for source in task.sources}


def config_values(spec: str) -> dict[str, Any]:
    """What a task sets in the config, by key; the objects of a user's file by name, so that a run can be read back."""
    task = load_task(spec)
    if not task.rows and not task.prepare and not task.defaults:
        raise PluginError(f"task {spec!r} has neither rows nor files to read: set rows, prepare or defaults")
    parts: dict[str, Any] = {
        "rollout.tools": [_name(entry, spec, "tool") for entry in task.tools],
        "rollout.interaction": task.interaction and _name(task.interaction, spec, "interaction"),
        "sft.script": task.script and _name(task.script, spec, "script"),
    }
    values = {key: value for key, value in parts.items() if value}
    if task.scorer is not None and is_own(spec):  # a built-in one is known by its data source: known_scorers
        key = "default" if task.further_sources else task.source  # no entry may name a source that no row has
        values["scoring.scorers"] = {key: _name(task.scorer, spec, "scorer")}
    for key in values:
        if key in task.defaults:
            raise PluginError(f"task {spec!r}: {key} is set twice, by a field of the Task and in its defaults")
    return {**values, **task.defaults}


def _name(entry: Any, spec: str, kind: str) -> str:
    """How a config names an object of a task's file; a text is a name already."""
    if isinstance(entry, str):
        return entry
    module_spec = spec.rpartition(":")[0] or spec
    module = sys.modules[load(f"{module_spec}:__name__", "task")]
    for name, value in vars(module).items():
        if value is entry:
            return f"{module_spec}:{name}"
    label = getattr(entry, "__name__", None) or getattr(entry, "name", None) or repr(entry)
    raise PluginError(
        f"task {spec!r}: its {kind} {label} has no name at the top level of {module_spec}; give it one there"
    )


def _checked(task: Any, spec: str) -> Task:
    if not isinstance(task, Task):
        raise PluginError(f"task {spec!r} must be a Task, not {type(task).__name__}")
    for what, value, is_good in (
        ("name", task.name, isinstance(task.name, str) and bool(task.name)),
        ("rows", task.rows, task.rows is None or callable(task.rows)),
        ("prepare", task.prepare, task.prepare is None or callable(task.prepare)),
        ("metrics", task.metrics, task.metrics is None or callable(task.metrics)),
        ("tools", task.tools, isinstance(task.tools, Sequence) and not isinstance(task.tools, str)),
        ("defaults", task.defaults, isinstance(task.defaults, Mapping)),
        ("reductions", task.reductions, isinstance(task.reductions, Mapping)),
    ):
        if not is_good:
            raise PluginError(f"task {spec!r}: {what} cannot be {value!r:.80}")
    return task


# --- turnwise prepare ---------------------------------------------------------------------------------------------


def preparable_tasks() -> list[str]:
    """The built-in tasks whose files can be made."""
    return [name for name in builtin_tasks() if load_task(name).prepare is not None]


def prepare_files(spec: str, arguments: Sequence[str]) -> Mapping[Path, int]:
    """Make a task's files as `turnwise prepare SPEC ARGUMENTS` does; the rows of each file."""
    if not is_own(spec) and spec not in preparable_tasks():
        raise ConfigError(unknown("task with files to prepare", spec, preparable_tasks()))
    task = load_task(spec)
    prepare = task.prepare
    if prepare is None:
        raise ConfigError(f"task {spec} makes its rows when they are needed: there is nothing to prepare")
    parser = argparse.ArgumentParser(f"turnwise prepare {spec}", description=inspect.getdoc(prepare))
    folder = data_folder(Path("data") / task.name)
    parser.add_argument("--out", type=Path, default=folder, help=f"output folder (default {folder})")
    for name, arguments_of in _options(prepare, spec):
        parser.add_argument(f"--{name.replace('_', '-')}", **arguments_of)
    parsed, rest = parser.parse_known_args(list(arguments))
    if rest:
        options = [name for action in parser._actions for name in action.option_strings]
        raise ConfigError(unknown(f"argument of `turnwise prepare {spec}`", rest[0], options))
    chosen = vars(parsed)
    written = call(lambda: prepare(chosen.pop("out"), **chosen), spec, "task")
    if not isinstance(written, Mapping):
        raise PluginError(f"task {spec!r}: prepare gives the rows of each file it wrote, not {written!r:.80}")
    return written


def _options(prepare: Callable[..., Any], spec: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """An argparse option for each keyword argument of a prepare function."""
    hints = typing.get_type_hints(prepare, include_extras=True)
    for name, parameter in list(inspect.signature(prepare).parameters.items())[1:]:
        hint = hints.get(name, str)
        about = ""
        if typing.get_origin(hint) is typing.Annotated:
            hint, about = typing.get_args(hint)[0], str(typing.get_args(hint)[1])
        kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not types.NoneType]
        if len(kinds) != 1 or not isinstance(kinds[0], type) or parameter.default is parameter.empty:
            raise PluginError(f"task {spec!r}: prepare's {name} must have a default and be a text, a number or an enum")
        default = parameter.default.value if isinstance(parameter.default, enum.Enum) else parameter.default
        kind: Any = _choice(kinds[0], name) if issubclass(kinds[0], enum.Enum) else kinds[0]
        about += "" if default is None else f" (default {default})"
        yield name, {"type": kind, "default": parameter.default, "help": about.strip().replace("%", "%%")}


def _choice(kind: type[enum.Enum], name: str) -> Callable[[str], enum.Enum]:
    def read(text: str) -> enum.Enum:
        valid = [str(member.value) for member in kind]
        if text not in valid:
            raise ConfigError(unknown(name, text, valid))
        return kind(text)

    return read


def rows_of(task: Task, spec: str, split: str, seed: int) -> Iterator[Any]:
    """The rows that a task makes, each with the task's data source where it names none."""
    if task.rows is None:
        raise DataError(f"task {spec} makes no rows")
    for values in task.rows(split, seed):
        lacks_source = isinstance(values, dict) and "data_source" not in values
        yield {"data_source": task.source, **values} if lacks_source and task.source else values
