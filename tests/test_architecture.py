"""The house rules as a test: layers, sizes, names, and one purpose per file."""

import ast
import dataclasses
import re
import typing
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from turnwise import config

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "turnwise"
LAYERS = (
    {"choices", "knobs"},
    {"types", "errors", "config", "metrics"},
    {"plugins", "config_check", "files", "serving", "retrying", "stopping", "strict_yaml", "together", "waiting"},
    {"chat", "data", "sandbox", "storage", "compose"},
    {"engines", "scoring"},
    {"rollout", "training", "web", "weights"},
    {"tasks", "compat", "trust"},
    {"task_metrics"},
    {"assemble", "report"},
    {"plan_text", "checks"},
    {"eval", "preflight", "sft", "trainer", "rescoring", "filtering"},
    {"train", "models"},
    {"commands"},
    {"cli"},
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}
HEAVY = {"torch", "transformers"}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules imported anywhere in a file, functions and TYPE_CHECKING blocks included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def layer_faults(room: str, imported: list[str]) -> list[str]:
    faults = []
    for module in imported:
        parts = module.split(".")
        if parts[0] != "turnwise" or len(parts) == 1 or parts[1] == room:
            continue
        if parts[1] not in LEVEL:
            faults.append(f"{module}: its room has no layer")
        elif LEVEL[parts[1]] >= LEVEL[room]:
            faults.append(f"{room} imports {module}: not strictly downward")
    return faults


def test_imports_go_strictly_downward():
    rooms = {path: room_of(path) for path in FILES if path != PACKAGE / "__init__.py" and room_of(path) != "conf"}
    assert len(rooms) > 100
    assert [f"{room} has no layer" for room in rooms.values() if room not in LEVEL] == []
    faults = [
        f"{path}: {fault}" for path, room in rooms.items() for fault in layer_faults(room, list(imports(TREES[path])))
    ]
    assert faults == []


def test_the_layer_rule_catches_sideways_and_upward_imports():
    assert layer_faults("engines", ["turnwise.scoring.gsm8k"])
    assert layer_faults("chat", ["turnwise.rollout.episode"])
    assert not layer_faults("rollout", ["turnwise.engines.sampler", "turnwise.rollout.group", "json"])


def test_files_and_functions_are_short_and_say_their_purpose():
    assert [path for path in FILES if path.read_text().count("\n") > 400] == []
    assert [path for path in FILES if not ast.get_docstring(TREES[path])] == [], "a file opens with its purpose"
    functions = [
        (path, node)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert len(functions) > 1000
    long = [(path, node.name) for path, node in functions if (node.end_lineno or 0) - node.lineno + 1 > 60]
    assert long == []


def test_no_room_for_odds_and_ends():
    forbidden = {"utils", "util", "common", "misc", "helpers", "helper"}
    assert [p for p in FILES if forbidden & {part.removesuffix(".py") for part in p.relative_to(PACKAGE).parts}] == []


def test_torch_is_not_imported_where_config_errors_are_found():
    light = [
        PACKAGE / f"{name}.py"
        for name in ("cli", "compose", "config", "knobs", "errors", "types", "plugins", "metrics")
    ]
    for path in light:
        top = [node for node in TREES[path].body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {name.split(".")[0] for node in top for name in imports(ast.Module([node], []))}
        assert not names & HEAVY, path


def sections() -> dict[str, type]:
    """Every section of the config by the name of its class."""
    return {
        name: made for name, made in vars(config).items() if isinstance(made, type) and dataclasses.is_dataclass(made)
    }


def keys() -> dict[str, str]:
    """The class of the section at each key of the whole config."""
    return {
        name: hint.__name__
        for name, hint in typing.get_type_hints(config.Config).items()
        if hint in sections().values()
    }


def classes_in(node: ast.AST | None, known: Collection[str]) -> set[str]:
    """Sections that an annotation names, also as text or beside None."""
    text = "" if node is None else ast.unparse(node)
    return known & set(re.findall(r"\w+", text))


def holders(tree: ast.AST, known: Collection[str]) -> Iterator[tuple[str, str]]:
    """(a name or an attribute that holds a section, the section's class), from annotations and assignments."""
    by_key = keys()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield from ((node.arg, section) for section in classes_in(node.annotation, known))
        elif isinstance(node, ast.AnnAssign):
            yield from ((last_name(node.target), section) for section in classes_in(node.annotation, known))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from ((node.name, section) for section in classes_in(node.returns, known))
        elif isinstance(node, ast.Assign | ast.NamedExpr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target, value in (pair for one in targets for pair in pairs(one, node.value)):
                if last_name(value) in by_key:
                    yield last_name(target), by_key[last_name(value)]


def pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """What is assigned to what, in `a, b = x, y` one by one."""
    both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
    return list(zip(target.elts, value.elts, strict=False)) if both else [(target, value)]


def last_name(node: ast.expr) -> str:
    """The name that an expression ends with: `c` of `a.b.c`, `f` of `a.f()`."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def knobs_read(trees: Iterable[ast.AST]) -> set[tuple[str, str]]:
    """(section, field) of every `holder.field`, where the holder is known to hold that section in that file."""
    known = sections().keys()
    found = set()
    for tree in trees:
        held: dict[str, set[str]] = {name: {section} for name, section in keys().items()} | {"config": {"Config"}}
        for holder, section in holders(tree, known):
            held.setdefault(holder, set()).add(section)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                found |= {(section, node.attr) for section in held.get(last_name(node.value), ())}
    return found


def test_every_knob_is_read_somewhere():
    """A knob nobody reads would be set in vain: each is read from a value of its own section, outside the config's files."""
    read = knobs_read(TREES[path] for path in FILES if path.name not in ("config.py", "compose.py", "config_check.py"))
    fields = [(name, field.name) for name, section in sections().items() for field in dataclasses.fields(section)]
    assert len(fields) > 100
    assert [".".join(one) for one in fields if one not in read] == []


def test_an_attribute_of_the_same_name_reads_no_knob():
    """`seconds` of anything else is not the sandbox's; a section is known by its annotation or by where it comes from."""
    assert not knobs_read([ast.parse("def f(limits: Limits): return limits.seconds")])
    for text in (
        "def f(given: SandboxConfig): return given.seconds",
        "def f(config): return config.sandbox.seconds",
        "def f(config):\n    given, x = config.sandbox, 1\n    return given.seconds",
        "class A:\n    given: SandboxConfig | None\n    def f(self): return self.given.seconds",
    ):
        assert ("SandboxConfig", "seconds") in knobs_read([ast.parse(text)]), text
