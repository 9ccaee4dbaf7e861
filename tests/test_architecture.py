"""The house rules as a test: layers, sizes, names, and one purpose per file."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "turnwise"
LAYERS = (
    {"media", "addresses"},
    {"choices", "knobs", "ledger"},
    {"types", "errors", "config", "metrics", "verl_imports"},
    {"plugins", "config_check", "files", "own_folder", "serving", "retrying", "code_blocks", "stopping", "strict_yaml"}
    | {"concurrency", "time_budget", "image_bytes", "environment", "clocked_process"},
    {"image_sources"},
    {"chat", "data", "sandbox", "storage", "config_readers", "corpus"},
    {"engines", "scoring"},
    {"rollout", "training", "web", "weights"},
    {"task"},
    {"tasks", "compat", "trust", "compose"},
    {"task_metrics", "config_docs", "cluster"},
    {"source_report"},
    {"assemble", "report"},
    {"plan_text", "checks", "train_report", "demonstrations", "inside_verl"},
    {"run"},
    {"eval", "preflight", "trainer", "rescoring", "replaying", "filtering"},
    {"train", "sft", "probing"},
    {"models"},
    {"commands", "completion"},
    {"cli"},
    {"__main__"},
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
    assert not layer_faults("rollout", ["turnwise.engines.samplers.sampler", "turnwise.rollout.group", "json"])


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
        *(PACKAGE / f"{name}.py" for name in ("cli", "compose", "knobs", "errors", "types", "plugins", "metrics")),
        *(path for room in ("config", "commands") for path in (PACKAGE / room).glob("*.py")),
    ]
    for path in light:
        top = [node for node in TREES[path].body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {name.split(".")[0] for node in top for name in imports(ast.Module([node], []))}
        assert not names & HEAVY, path


def test_every_knob_is_read_where_it_has_an_effect():
    """A knob that nobody reads would be set in vain: each is an attribute of its own section somewhere."""
    from turnwise.config import Config
    from turnwise.config_readers import readers
    from turnwise.knobs import knobs_of

    read = readers()
    assert [key for key in knobs_of(Config) if key not in read] == []


@pytest.mark.parametrize(
    ("body", "read"),
    [
        ("def f(config: Config):\n    return config.training.steps", {"training.steps"}),
        ("def f(x: TrainingConfig):\n    return x.steps", {"training.steps"}),
        ("def f(x: 'SftConfig | None'):\n    return x.steps", {"sft.steps"}),
        ("def f(config):\n    a, b = config.sft, config.training\n    return b.steps", {"training.steps"}),
        ("class A:\n    def g(self):\n        return self.x.steps\n    def __init__(self, y: Config):\n"
         "        self.x = y.sft", {"sft.steps"}),
        ("class A:\n    x: SftConfig\n    def g(self):\n        return self.x.steps", {"sft.steps"}),
        ("def f(run):\n    return run.steps, run.training.steps, steps", set()),
        ("def f(config):\n    config.seed = 1", set()),
        ("def f(x: SftConfig):\n    def g(x):\n        return x.steps", set()),
    ],
)  # fmt: skip
def test_a_name_alone_does_not_count_as_reading_a_knob(body, read):

    from turnwise.config_readers import reads, sections

    kinds = sections()
    fields = {section: {field.name for field in dataclasses.fields(kind)} for section, kind in kinds.items()}
    classes = {kind.__name__: section for section, kind in kinds.items()}
    assert set(reads(ast.parse(body), classes, fields)) == read
