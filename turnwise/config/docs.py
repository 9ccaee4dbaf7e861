"""What every knob is for: its docstring, default, type, choices, and who reads it, as `turnwise config` shows them."""

import ast
import enum
import functools
import inspect
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.config import brought_names
from turnwise.config.compose import other_names
from turnwise.config.knob_usage import PACKAGE, ROOT, readers, sections
from turnwise.config.knobs import PLUGIN, Knob, kind_of, knobs_of
from turnwise.config.sections import full_config
from turnwise.errors import ConfigError
from turnwise.errors.nearest_name import meant


@dataclass(frozen=True, slots=True)
class KnobPage:
    """All that is known of one key."""

    key: str
    knob: Knob
    text: str
    """Its docstring: what it does, then when to touch it."""
    by_task: dict[str, Any]
    """The default of those tasks that set another."""

    @property
    def summary(self) -> str:
        """What it does, in one sentence."""
        return self.text.partition(". ")[0].rstrip(".") + "."

    @property
    def takes(self) -> str:
        """The values it takes, in words."""
        if self.knob.choices:
            own = [PLUGIN] if self.knob.takes_plugin else []
            return " | ".join([*self.knob.choices, *own, *(["null"] if self.knob.takes_null else [])])
        limits = "" if self.knob.limits is None else f", {self.knob.limits}"
        return kind_of(self.knob.hint) + limits + (", or null" if self.knob.takes_null else "")

    @property
    def when(self) -> str | None:
        """When it is read, if that is not always."""
        if self.knob.only is None:
            return None
        key, values = self.knob.only
        if values == ("*",):
            return f"only when {key} is set"
        other, more = self.knob.also or ("", ())
        ways = [f"{name}={shown(_plain(value))}" for name, every in ((key, values), (other, more)) for value in every]
        return f"only with {' or '.join(ways)}"

    def choices(self) -> dict[str, str]:
        """Its choices with their meaning."""
        if isinstance(self.knob.offered, Mapping):
            return dict(self.knob.offered)
        kind = self.knob.choice_type
        return {} if kind is None else meanings(kind)

    def as_json(self, read_by: Sequence[str]) -> dict[str, Any]:
        """The page of the key as values that JSON can hold."""
        return {
            "key": self.key, "default": _value(self.knob.default), "task_defaults": self.by_task, "takes": self.takes,
            "choices": self.choices(), "read": self.when or "always", "read_by": list(read_by), "doc": self.text,
        }  # fmt: skip


def pages(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, KnobPage]:
    """The page of every key, in the order of the config; `tasks` are the values that each task sets."""
    texts = {section: field_docs(kind) for section, kind in sections().items()}
    by_key = {}
    for key, knob in knobs_of(full_config()).items():
        section, _, name = key.rpartition(".")
        by_key[key] = KnobPage(key, knob, texts[section].get(name, ""), _of_tasks(key, tasks))
    return by_key


def section_docs() -> dict[str, str]:
    """What each section is about; "" holds the keys without a dot."""
    return {section: inspect.cleandoc(kind.__doc__ or "") for section, kind in sections().items()} | {
        ROOT: "The run as a whole."
    }


def find(name: str, every: Mapping[str, KnobPage]) -> list[KnobPage]:
    """The page of a key, or those of a section; ConfigError with the nearest name, or what stands for it here."""
    name = name.rstrip(".")
    if name in every:
        return [every[name]]
    inside = [page for key, page in every.items() if key.startswith(f"{name}.")]
    if inside:
        return inside
    holder = next((key for key, page in every.items() if page.knob.is_dict and name.startswith(f"{key}.")), None)
    if holder is not None:
        return [every[holder]]
    hint = meant(name, [*every, *filter(None, sections()), *other_names()])
    raise ConfigError(f"unknown key {name!r}: {hint or '`turnwise config` lists them all'}")


def equivalent(name: str) -> str | None:
    """What stands here for a key of another system or of an earlier version; None for any other name."""
    return other_names().get(name, brought_names.equivalent(name, knobs_of(full_config())))


def read_by(key: str) -> dict[str, str]:
    """The modules that read a key, each with its purpose."""
    return {module: _purpose(PACKAGE / module) for module in readers(key).get(key, [])}


def field_docs(kind: type) -> dict[str, str]:
    """The string below each member of a class, on one line."""
    body = _classes(kind.__module__).get(kind.__name__, [])
    texts = {}
    for member, after in itertools.pairwise(body):
        target = member.target if isinstance(member, ast.AnnAssign) else None
        if isinstance(member, ast.Assign):
            target = member.targets[0]  # type: ignore[assignment]
        match after:
            case ast.Expr(value=ast.Constant(value=str(text))) if isinstance(target, ast.Name):
                texts[target.id] = " ".join(text.split())
    return texts


def meanings(kind: type[enum.Enum]) -> dict[str, str]:
    """Each value of an enum with the string below it."""
    texts = field_docs(kind)
    return {member.value: texts.get(name, "") for name, member in kind.__members__.items()}


def shown(value: Any) -> str:
    """A value as one would write it on the command line."""
    value = _value(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


@functools.lru_cache
def _classes(module: str) -> dict[str, list[ast.stmt]]:
    tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8"))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def _purpose(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def _of_tasks(key: str, tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {task: values[key] for task, values in tasks.items() if key in values}


def _value(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


def _plain(text: str) -> Any:
    """A value of `only(...)`, which are texts."""
    return {"None": None, "True": True, "False": False}.get(text, text)
