"""Which modules read a knob, found in the source: attributes of values that are known to be a section of the config."""

import ast
import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from turnwise.config import Config
from turnwise.config.sections import full_config

PACKAGE = Path(__file__).parent.parent
NOT_READERS = ("config/", "reports/checks/", "reports/plan.py", "reports/preflight.py", "training/runs/trust.py")
"""Rooms that check, show or document values; what they read has no effect on a run."""
PLAYING = ("reports/checks/rollouts.py", "config/evaluation_sampling.py")
"""Files of theirs that play episodes themselves, or say how they are played."""
ROOT = ""
"""The section of the keys without a dot."""


def sections() -> dict[str, type]:
    """The dataclass of every section, the root's as well."""
    kinds = typing.get_type_hints(full_config()).items()
    inner = {name: kind for name, kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    return {ROOT: Config, **inner}


def readers(key: str | None = None) -> dict[str, list[str]]:
    """Files below the package by the key they read, for all keys or only this one."""
    kinds = sections()
    fields = {section: {entry.name for entry in dataclasses.fields(kind)} for section, kind in kinds.items()}
    classes = {kind.__name__: section for section, kind in kinds.items()}
    name = None if key is None else key.rpartition(".")[2]
    modules: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE)
        if module.as_posix().startswith(NOT_READERS) and module.as_posix() not in PLAYING:
            continue
        text = path.read_text(encoding="utf-8")
        if name is not None and f".{name}" not in text:  # parsing is what takes time
            continue
        for read in sorted(set(reads(ast.parse(text), classes, fields))):
            if key is None or read == key:
                modules.setdefault(read, []).append(module.as_posix())
    return modules


def reads(tree: ast.Module, classes: dict[str, str], fields: dict[str, set[str]]) -> Iterator[str]:
    """Every `section.field` that a module reads."""
    yield from _Scope(classes, fields).reads(tree)


@dataclass
class _Scope:
    """What is known of names and attributes at one place: which of them hold which section."""

    classes: dict[str, str]
    fields: dict[str, set[str]]
    known: dict[str, str] = field(default_factory=dict)
    """Section by the text of an expression, such as `self._config`."""

    def reads(self, node: ast.AST) -> Iterator[str]:
        inner = _Scope(self.classes, self.fields, dict(self.known))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner._learn_arguments(node.args)
        inner._learn(node)
        for child in _within(node):
            if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load):
                section = inner.section(child.value)
                if section is not None and child.attr in self.fields[section]:
                    key = f"{section}.{child.attr}" if section else child.attr
                    if key not in self.fields:  # a section itself is no knob
                        yield key
            elif _opens_scope(child):
                yield from inner.reads(child)

    def section(self, node: ast.expr) -> str | None:
        """The section that an expression holds, as far as it can be seen here."""
        match node:
            case ast.Name() | ast.Attribute() if (section := self.known.get(_dotted(node))) is not None:
                return section
            case ast.Name(id="config") | ast.Attribute(attr="config" | "_config"):
                return ROOT  # the house's name for the whole tree
            case ast.Attribute(value=value, attr=name):
                return name if name and name in self.fields and self.section(value) == ROOT else None
            case ast.Call(func=ast.Name(id="replace") | ast.Attribute(attr="replace"), args=[first, *_]):
                return self.section(first)
            case ast.Call(func=ast.Name(id="section"), args=[_, ast.Name(id=name)]) | ast.Call(func=ast.Name(id=name)):
                return self.classes.get(name)
            case ast.BoolOp(values=values):
                return next((section for value in values if (section := self.section(value)) is not None), None)
            case ast.NamedExpr(value=value):
                return self.section(value)
        return None

    def _learn_arguments(self, arguments: ast.arguments) -> None:
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            self.known.pop(argument.arg, None)
            if argument.annotation is not None:
                self._annotate(argument.arg, argument.annotation)

    def _annotate(self, name: str, annotation: ast.expr) -> None:
        text = annotation.value if isinstance(annotation, ast.Constant) else annotation
        tree = ast.parse(text, mode="eval") if isinstance(text, str) else annotation
        names = {part.id for part in ast.walk(tree) if isinstance(part, ast.Name)}
        for kind in names & self.classes.keys():
            self.known[name] = self.classes[kind]

    def _learn(self, node: ast.AST) -> None:
        """Assignments of this scope, and of a class all those to `self` in its methods, whatever their order."""
        assigned = list(_within(node))
        if isinstance(node, ast.ClassDef):
            for method in (child for child in assigned if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)):
                inner = _Scope(self.classes, self.fields, dict(self.known))
                inner._learn_arguments(method.args)
                inner._learn(method)
                self.known |= {name: section for name, section in inner.known.items() if name.startswith("self.")}
        for _ in range(2):  # an assignment may build on a later one
            for child in assigned:
                match child:
                    case ast.AnnAssign(target=target, annotation=annotation):
                        own = "self." if isinstance(node, ast.ClassDef) else ""
                        self._annotate(own + _dotted(target), annotation)
                    case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                        for assigned_to, value in zip(targets, values, strict=False):
                            self._assign(assigned_to, value)
                    case ast.Assign(targets=targets, value=value):
                        for assigned_to in targets:
                            self._assign(assigned_to, value)
                    case ast.NamedExpr(target=target, value=value):
                        self._assign(target, value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        section = self.section(value)
        if section is not None:
            self.known[_dotted(target)] = section


def _dotted(node: ast.AST) -> str:
    """`self.config` as text; what is not made of names only is "?"."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{_dotted(value)}.{name}"
    return "?"


def _opens_scope(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda)


def _within(node: ast.AST) -> Iterator[ast.AST]:
    """What lies in a scope, down to the scopes inside it and without their content."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not _opens_scope(child):
            yield from _within(child)
