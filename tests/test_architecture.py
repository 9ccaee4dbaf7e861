"""The house rules as a test: layers, sizes, names, and one purpose per file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "turnwise"
LAYERS = (
    {"choices", "knobs"},
    {"types", "errors", "config", "metrics"},
    {
        "plugins",
        "config_check",
        "files",
        "serving",
        "retrying",
        "stopping",
        "strict_yaml",
        "concurrency",
        "time_budget",
    },
    {"chat", "data", "sandbox", "storage", "compose"},
    {"engines", "scoring"},
    {"rollout", "training", "web", "weights"},
    {"tasks", "compat", "trust"},
    {"task_metrics"},
    {"assemble", "report"},
    {"plan_text", "checks", "demonstrations"},
    {"run"},
    {"eval", "preflight", "sft", "trainer", "rescoring", "filtering"},
    {"train", "models"},
    {"commands"},
    {"cli"},
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))
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


@pytest.mark.parametrize(
    "path", [p for p in FILES if p != PACKAGE / "__init__.py"], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_imports_go_strictly_downward(path):
    if room_of(path) == "conf":
        return
    assert room_of(path) in LEVEL, f"{room_of(path)} has no layer"
    assert layer_faults(room_of(path), list(imports(ast.parse(path.read_text())))) == []


def test_the_layer_rule_catches_sideways_and_upward_imports():
    assert layer_faults("engines", ["turnwise.scoring.gsm8k"])
    assert layer_faults("chat", ["turnwise.rollout.episode"])
    assert not layer_faults("rollout", ["turnwise.engines.sampler", "turnwise.rollout.group", "json"])


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_are_short_and_say_their_purpose(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert text.count("\n") <= 400
    assert ast.get_docstring(tree), "a file opens with one sentence of purpose"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno + 1 <= 60, node.name


def test_no_room_for_odds_and_ends():
    forbidden = {"utils", "util", "common", "misc", "helpers", "helper"}
    assert [p for p in FILES if forbidden & {part.removesuffix(".py") for part in p.relative_to(PACKAGE).parts}] == []


def test_torch_is_not_imported_where_config_errors_are_found():
    light = [
        PACKAGE / f"{name}.py"
        for name in ("cli", "compose", "config", "knobs", "errors", "types", "plugins", "metrics")
    ]
    for path in light:
        top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {name.split(".")[0] for node in top for name in imports(ast.Module([node], []))}
        assert not names & HEAVY, path


def test_every_knob_is_read_somewhere():
    """A knob nobody reads would be set in vain: each field name is used as an attribute outside config.py."""
    import dataclasses

    from turnwise import config

    used = {
        node.attr
        for path in FILES
        if path.name not in ("config.py", "compose.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    sections = [value for value in vars(config).values() if isinstance(value, type) and dataclasses.is_dataclass(value)]
    unread = [f"{s.__name__}.{f.name}" for s in sections for f in dataclasses.fields(s) if f.name not in used]
    assert unread == []
