"""The house rules as a test: layers, guests at the door, sizes, names, and one purpose per file."""

import ast
import collections
import dataclasses
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from turnwise.extensions import Engine, Named, ours

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "turnwise"
LAYERS = (
    {"types", "ledger", "errors", "extensions"},
    {"system", "config"},
    {"chat", "data", "storage"},
    {"engines", "scoring"},
    {"rollout"},
    {"training"},
    {"reports"},
    {"train", "eval", "sft"},
    {"commands"},
)
"""Imports go strictly downward between rooms; the nouns of the first layer may name each other."""
EXTENSIONS_USE = {
    "board": set[str](),
    "conversations": set[str](),
    "fsdp": set[str](),
    "dpo": {"conversations"},  # a row is two conversations
    "gym": set[str](),
    "http_env": set[str](),
    "judge": set[str](),
    "llm_user": {"judge"},
    "mcp": set[str](),
    "ray": {"fsdp", "sandbox", "servers"},
    "research": set[str](),
    "sandbox": set[str](),
    "sdk_agents": set[str](),
    "servers": set[str](),
    "serving": {"sdk_agents"},  # the same requests and replies: one side trains on them, the other answers
    "sglang": {"servers"},
    "swe": {"sandbox"},
    "tinylook": {"judge", "sandbox"},
    "trackers": set[str](),
    "trl": set[str](),
    "verifiers": {"sdk_agents"},
    "verl": {"sandbox", "research"},
    "vision_bench": set[str](),
    "vllm": {"servers"},
    "weights": set[str](),
}
"""Every extension is a leaf: it may use the whole core, and of other extensions only these."""
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}
DOORS = {"__init__", "__main__"}
"""What a user calls; they open everything."""
HEAVY = {"torch", "transformers"}
DIALECT = {"found", "one", "given", "kept", "shown", "said", "seen", "made", "known", "place", "told", "some", "taken", "asked"}  # fmt: skip


GUESTS = r"vllm|sglang|wandb|mlflow|\bmcp\b|\bswe\b|\bray\b|tinylook|\btrl\b|\bnccl\b|gvisor|verifiers"
MAY_NAME = {
    ("chat/formats/phi4_mini.py", "vllm"),
    ("commands/probe.py", "tinylook"),
    ("config/choices.py", "swe"),
    ("config/engine.py", "ray"),
    ("config/engine.py", "sglang"),
    ("config/engine.py", "vllm"),
    ("config/rollout.py", "sglang"),
    ("config/rollout.py", "vllm"),
    ("config/training.py", "mlflow"),
    ("config/training.py", "wandb"),
    ("data/task.py", "verifiers"),
    ("reports/plan.py", "nccl"),
}
"""What knobs say of engines and trackers that ship with Turnwise, and examples of commands."""


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


CORE = [path for path in FILES if room_of(path) != "ext"]


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules imported anywhere in a file, functions and TYPE_CHECKING blocks included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (
                f"{node.module}.{alias.name}" for alias in node.names if node.module in ("turnwise", "turnwise.ext")
            )


def layer_faults(room: str, imported: list[str]) -> list[str]:
    faults = []
    for module in imported:
        parts = module.split(".")
        if parts[0] != "turnwise" or len(parts) == 1 or parts[1] == room or parts[1][0].isupper():
            continue
        if parts[1] == "ext":
            faults.append(f"{room} imports {module}: the core knows no extension by name")
        elif parts[1] not in LEVEL:
            faults.append(f"{module}: its room has no layer")
        elif LEVEL[parts[1]] > LEVEL[room] or (LEVEL[parts[1]] == LEVEL[room] != 0):
            faults.append(f"{room} imports {module}: not strictly downward")
    return faults


def extension_faults(name: str, imported: list[str]) -> list[str]:
    used = {module.split(".")[2] for module in imported if module.startswith("turnwise.ext.")}
    return [f"{name} imports {other}" for other in used - {name} - EXTENSIONS_USE[name]]


def test_imports_go_strictly_downward_and_the_core_imports_no_extension():
    rooms = {path: room_of(path) for path in CORE if room_of(path) not in DOORS}
    assert len(rooms) > 100
    assert [f"{room} has no layer" for room in rooms.values() if room not in LEVEL] == []
    faults = [
        f"{path.relative_to(ROOT)}: {fault}"
        for path, room in rooms.items()
        for fault in layer_faults(room, list(imports(TREES[path])))
    ]
    assert faults == []


def test_the_layer_rule_catches_sideways_and_upward_imports_and_guests():
    assert layer_faults("engines", ["turnwise.scoring.rules.gsm8k"])
    assert layer_faults("chat", ["turnwise.rollout.episode"])
    assert layer_faults("commands", ["turnwise.ext.board.command"])
    assert layer_faults("rollout", list(imports(ast.parse("def f():\n    from turnwise.ext import verl"))))
    assert not layer_faults("rollout", ["turnwise.engines.samplers.sampler", "turnwise.rollout.group", "json"])


def test_extensions_are_named_in_the_table_alone():
    """A name in a text would be an import as well: the core has one, of the table."""
    texts = {path: path.read_text() for path in CORE}
    named = [(path.name, name) for path, text in texts.items() for name in re.findall(r"turnwise[./]ext\b[.\w]*", text)]
    assert named == [("extensions.py", "turnwise.ext.table")]
    guests = re.compile(rf"verl(?!a|o)|{GUESTS}", re.IGNORECASE)  # not overlap, overload
    named = {(str(path.relative_to(PACKAGE)), word) for path, text in texts.items() for word in guests.findall(text)}
    assert {(path, word.lower()) for path, word in named} == MAY_NAME


def test_every_name_in_the_table_leads_to_something():
    """A record is text, so a mistake in it would be found by whoever names the guest first."""
    places = [
        (name, place)
        for name, extension in ours().items()
        for kind in dataclasses.fields(extension)
        for value in [getattr(extension, kind.name)]
        if kind.name not in ("sources", "reaches", "keys", "model_variables", "keys_of_options")
        for place in (value.values() if isinstance(value, Mapping) else [value] if value else [])
    ]
    texts = [
        (name, place.opener if isinstance(place, Engine) else place.place if isinstance(place, Named) else place)
        for name, place in places
    ]
    assert len(texts) > 60
    for name, text in texts:
        module, _, attribute = text.partition(":")
        if "." not in module:
            continue  # another name of a loop of ours
        loaded = importlib.import_module(module)
        assert not attribute or hasattr(loaded, attribute), f"{name}: {text}"


def test_an_extension_is_a_leaf_with_its_own_tests_docs_and_purpose():
    folders = {path.name for path in (PACKAGE / "ext").iterdir() if (path / "__init__.py").exists()}
    assert folders == set(EXTENSIONS_USE)
    faults = [
        f"{path.relative_to(ROOT)}: {fault}"
        for path in FILES
        if room_of(path) == "ext" and len(path.relative_to(PACKAGE).parts) > 2
        for fault in extension_faults(path.relative_to(PACKAGE).parts[1], list(imports(TREES[path])))
    ]
    assert faults == []
    assert extension_faults("gym", ["turnwise.ext.verl.tools"]) == ["gym imports verl"]
    assert [name for name in folders if not list((ROOT / "tests" / "ext" / name).rglob("test_*.py"))] == []
    pages = {path.stem: path.read_text() for path in (ROOT / "docs" / "ext").glob("*.md")}
    assert [name for name in folders if name not in pages] == []
    purposes = {name: ast.get_docstring(TREES[PACKAGE / "ext" / name / "__init__.py"]) or "" for name in folders}
    assert [name for name, text in purposes.items() if len(text.split()) < 5] == []


def test_what_a_message_or_page_says_to_install_is_an_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = {path: path.read_text() for path in [*FILES, ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]}
    named = {extra for text in texts.values() for extra in re.findall(r"turnwise\[([a-z_]+)\]", text)}
    assert len(named) > 8 and named <= extras.keys()


def test_the_loop_loads_no_guest():
    """What `import turnwise.train` really loads, in a process of its own."""
    code = "import sys, turnwise.train; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    ours = [name for name in loaded if name.startswith("turnwise.")]
    assert "turnwise.rollout.episode" in ours
    later = ("chat.renderer", "config.compose", "data.rows", "engines.memory_plan", "reports.checks.run_checks")
    assert [name for name in later if f"turnwise.{name}" in ours] == []
    assert len(ours) <= 165, "import inside a function what only some runs, or only their ends, need"
    assert [name for name in ours if name.startswith("turnwise.ext.")] == []
    assert {"ray", "vllm", "sglang", "mcp", "verl", "trl", "gymnasium", "fastapi", "wandb"} & set(loaded) == set()


def test_the_root_holds_the_nouns_the_loops_and_the_doors():
    names = {path.stem for path in PACKAGE.glob("*.py")}
    assert names == DOORS | {"types", "ledger", "extensions", "train", "eval", "sft"}


def test_contributing_tells_the_rooms_of_this_test():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = re.findall(r"(?m)^    ([a-z_]+)/ ", text)
    folders = [room for layer in LAYERS for room in sorted(layer) if (PACKAGE / room).is_dir()]
    assert sorted(rooms) == sorted([*folders, "ext"])
    assert [LEVEL.get(room, len(LAYERS)) for room in rooms] == sorted(LEVEL.get(room, len(LAYERS)) for room in rooms)
    chain = next(line for line in text.splitlines() if line.strip().startswith("types ledger"))
    assert [set(layer.split()) for layer in chain.split("<")] == list(LAYERS)
    extensions = re.search(r"(?ms)^    ext/ (.*?)\n\n", text)
    assert extensions is not None
    assert set(re.findall(r"\w+", extensions.group(1).partition(":")[2])) == set(EXTENSIONS_USE)


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


def test_one_public_class_name_is_one_class():
    homes = collections.defaultdict(list)
    for path, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_bindings_say_what_they_hold():
    """`found`, `one`, `given` say how a thing came, not what it is; at most ten of a thousand bindings are called so."""
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    names = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    names += [arg.arg for node in nodes if isinstance(node, ast.arguments) for arg in node.args + node.kwonlyargs]
    assert len(names) > 10_000
    assert 1000 * sum(name in DIALECT for name in names) / len(names) <= 10


def test_no_room_for_odds_and_ends():
    forbidden = {"utils", "util", "common", "misc", "helpers", "helper"}
    assert [p for p in FILES if forbidden & {part.removesuffix(".py") for part in p.relative_to(PACKAGE).parts}] == []


def test_torch_is_not_imported_where_config_errors_are_found():
    light = [
        *(PACKAGE / f"{name}.py" for name in ("extensions", "types")),
        *(path for room in ("config", "commands", "errors") for path in (PACKAGE / room).glob("*.py")),
        *(PACKAGE / "system" / f"{name}.py" for name in ("plugins", "metrics")),
    ]
    for path in light:
        top = [node for node in TREES[path].body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {name.split(".")[0] for node in top for name in imports(ast.Module([node], []))}
        assert not names & HEAVY, path


def test_every_knob_is_read_where_it_has_an_effect():
    """A knob that nobody reads would be set in vain: each is an attribute of its own section somewhere."""
    from turnwise.config.knob_usage import readers
    from turnwise.config.knobs import knobs_of
    from turnwise.config.sections import full_config

    read = readers()
    assert [key for key in knobs_of(full_config()) if key not in read] == []


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

    from turnwise.config.knob_usage import reads, sections

    kinds = sections()
    fields = {section: {field.name for field in dataclasses.fields(kind)} for section, kind in kinds.items()}
    classes = {kind.__name__: section for section, kind in kinds.items()}
    assert set(reads(ast.parse(body), classes, fields)) == read
