"""Measures of the house: how much one must read, and whether it can be guessed; here, and at an earlier commit.

python benchmarks/house.py                        this tree
python benchmarks/house.py --before COMMIT        and that commit, in the next column
python benchmarks/house.py --run                  also run one small training step: calls from train() to backward()
"""

import argparse
import ast
import collections
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIALECT = {
    "found",
    "one",
    "given",
    "kept",
    "shown",
    "said",
    "seen",
    "made",
    "known",
    "place",
    "told",
    "some",
    "taken",
    "asked",
}
GUESTS = re.compile(r"\.(ext|cluster|compat|inside_verl)\.|verl|vllm|sglang|nccl|mcp_|trl_|gvisor|\bswe")
ENGINE_ASKED = re.compile(
    r"EngineName\.\w+|engine\.name\s*(==|!=|in\b|not in\b)|\b(TRAINABLE|RENDERING|FOREIGN|IN_PROCESS|SERVERS)\b"
)
EPISODE_TYPES = (
    "Row", "Sample", "Draw", "Prompt", "Ledger", "Request", "QueuedRequest", "RunningRequest", "Completion",
    "Turn", "Branch", "Trajectory", "Group", "Collected", "TrainSequence", "_Episode", "TokenBatch",
    "BatchPart", "DeviceBatch", "PolicyTokens", "TokenOutputs", "UpdateResult", "TokenTrainingData",
)  # fmt: skip
"""What carries an episode from its row to the gradient and back."""
KNOBS = """
import importlib, dataclasses
for name in ("turnwise.config.knobs", "turnwise.knobs"):
    try: knobs = importlib.import_module(name); break
    except ModuleNotFoundError: pass
from turnwise.config import Config
print(len(knobs.knobs_of(Config)))
"""
DEPTH = """
import asyncio, io, pathlib, sys, torch, turnwise
from rich.console import Console
root, calls, real = str(pathlib.Path(turnwise.__file__).parent), [], torch.Tensor.backward
def awaited(task):
    names, coroutine = [], task.get_coro()
    while hasattr(coroutine, "cr_code"):
        if coroutine.cr_code.co_filename.startswith(root): names.append(coroutine.cr_code.co_name)
        coroutine = coroutine.cr_await
    return names
def backward(self, *args, **kwargs):
    frame, names = sys._getframe(1), []
    while frame is not None:
        if frame.f_code.co_filename.startswith(root): names.insert(0, frame.f_code.co_name)
        frame = frame.f_back
    tasks = [awaited(task) for task in list(asyncio.tasks._all_tasks) if not task.done()]
    if not calls: calls.extend(max((chain for chain in tasks if "learn" in chain), key=len, default=[]) + names)
    return real(self, *args, **kwargs)
torch.Tensor.backward = backward
config = turnwise.configure(
    "rollout.tools=[calculate]", "training.steps=1", "training.groups=4", "training.group_size=4", "eval.samples=2",
    "engine.threads=1", "run=depth")
turnwise.train(config, console=Console(file=io.StringIO()))
calls = [name for name in calls if name[0] != "<" and name != "body"]  # the loop around any coroutine
print(len(calls), *calls)
"""


class House:
    """One tree, parsed once."""

    def __init__(self, root: Path) -> None:
        self.root, self.package = root, root / "turnwise"
        self.texts = {path: path.read_text() for path in sorted(self.package.rglob("*.py"))}
        self.trees = {path: ast.parse(text) for path, text in self.texts.items()}
        self.lines = {path: text.count("\n") for path, text in self.texts.items()}
        self.core = [path for path in self.texts if path.relative_to(self.package).parts[0] != "ext"]
        self.modules = {self.module(path): path for path in self.texts}

    def module(self, path: Path) -> str:
        return ".".join(path.relative_to(self.root).with_suffix("").parts).removesuffix(".__init__")

    def owner(self, path: Path) -> str:
        """The extension of a file; all of the core is one."""
        parts = path.relative_to(self.package).parts
        return parts[1] if parts[0] == "ext" else ""

    def layers(self) -> object:
        path = self.root / "tests" / "test_architecture.py"
        for node in ast.parse(path.read_text()).body if path.exists() else ():
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and node.targets[0].id == "LAYERS"
            ):
                assert isinstance(node.value, ast.Tuple)
                return len(node.value.elts)
        return "-"

    def loaded(self) -> set[str]:
        """What `import turnwise.train` loads of the package, by the imports at the top of each module."""
        names, todo = set[str](), ["turnwise.train"]
        while todo:
            name = todo.pop()
            if name in self.modules and name not in names:
                names.add(name)
                todo += [*imports(self.trees[self.modules[name]].body), name.rpartition(".")[0]]
        return names

    def bindings(self) -> list[str]:
        nodes = [node for tree in self.trees.values() for node in ast.walk(tree)]
        stored = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        return stored + [
            argument.arg
            for node in nodes
            if isinstance(node, ast.arguments)
            for argument in node.args + node.kwonlyargs
        ]

    def classes(self, *, private: bool = False) -> collections.Counter[str]:
        return collections.Counter(
            node.name
            for tree in self.trees.values()
            for node in tree.body
            if isinstance(node, ast.ClassDef) and (private or node.name[0] != "_")
        )

    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        nodes = (node for tree in self.trees.values() for node in ast.walk(tree))
        return [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    def short_docstrings(self) -> int:
        docs = [ast.get_docstring(node) for node in self.functions()]
        return sum(text is not None and len(text) <= 28 for text in docs)

    def import_share(self) -> float:
        code = sum(
            bool(line.strip()) and not line.strip().startswith("#")
            for text in self.texts.values()
            for line in text.splitlines()
        )
        nodes = (
            node
            for tree in self.trees.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
        )
        return 100 * sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes) / code

    def only_importers(self) -> int:
        """Modules with one importer of the core or the same extension that would fit into it under 400 lines."""
        importers = collections.defaultdict(set)
        for path, tree in self.trees.items():
            for name in imports(list(ast.walk(tree))):
                if name in self.modules and self.modules[name] != path:
                    importers[name].add(path)
        return sum(
            len(paths) == 1
            and self.owner(next(iter(paths))) == self.owner(self.modules[name])
            and self.lines[self.modules[name]] + self.lines[next(iter(paths))] <= 400
            and self.modules[name].name != "__init__.py"
            for name, paths in importers.items()
        )

    def engine_lines(self) -> str:
        asked = {
            path: len([line for line in self.texts[path].splitlines() if ENGINE_ASKED.search(line)])
            for path in self.core
        }
        counts = [count for count in asked.values() if count]
        return f"{sum(counts)} in {len(counts)} files"

    def run(self, code: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
        return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else f"failed: {done.stderr.strip()[-120:]}"

    def measures(self, *, train: bool) -> dict[str, tuple[object, str]]:
        loaded, names, classes = self.loaded(), self.bindings(), self.classes()
        guests = [name for name in loaded if GUESTS.search(name)]
        readme = (self.root / "README.md").read_text().splitlines()
        longest = max((node.end_lineno or 0) - node.lineno + 1 for node in self.functions())
        carried = self.classes(private=True)
        extras = tomllib.loads((self.root / "pyproject.toml").read_text())["project"].get("optional-dependencies", {})
        rows: dict[str, tuple[object, str]] = {
            "files of the package": (len(self.texts), "-"),
            "files at its root": (len(list(self.package.glob("*.py"))), "9"),
            "layers of the architecture test": (self.layers(), "9"),
            "lines of the core": (f"{sum(self.lines[path] for path in self.core):,}", "50,000"),
            "lines of the package": (f"{sum(self.lines.values()):,}", "83,000"),
            "core files that name verl": (
                sum(bool(re.search(r"verl(?!a|o)", self.texts[path], re.IGNORECASE)) for path in self.core),
                "0",
            ),
            "core files that import an extension": (
                sum(bool(re.search(r"turnwise[.]ext\b(?!.table)", self.texts[path])) for path in self.core),
                "0",
            ),
            "lines that ask which engine it is": (self.engine_lines(), "0"),
            "modules that turnwise.train imports": (len(loaded), "150"),
            "their lines": (f"{sum(self.lines[self.modules[name]] for name in loaded):,}", "22,000"),
            "guests among them": (len(guests), "0"),
            "public class names for several classes": (sum(count > 1 for count in classes.values()), "0"),
            "bindings called found, one ... per 1,000": (
                round(1000 * sum(name in DIALECT for name in names) / len(names), 1),
                "10",
            ),
            "docstrings of functions up to 28 characters": (self.short_docstrings(), "-"),
            "import lines, % of code": (round(self.import_share(), 1), "8"),
            "one importer, fits into it": (self.only_importers(), "15"),
            "types that carry an episode": (sum(name in carried for name in EPISODE_TYPES), "18"),
            "knobs of the core's config": (self.run(KNOBS), "150"),
            "files over 400 lines; longest function": (
                f"{sum(n > 400 for n in self.lines.values())}; {longest}",
                "0; 60",
            ),
            "extras in pyproject.toml": (len(extras), "-"),
            "README lines; over 120 characters": (
                f"{len(readme)}; {sum(len(line) > 120 for line in readme)}",
                "120; 0",
            ),
        }
        if train:
            rows["calls from train() to backward()"] = (self.run(DEPTH).split(" ")[0], "8")
        return rows


def imports(nodes: list[ast.stmt] | list[ast.AST]) -> list[str]:
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="COMMIT", help="an earlier commit to stand beside this tree")
    parser.add_argument("--run", action="store_true", help="run a small training step to count calls")
    arguments = parser.parse_args()
    now = House(ROOT).measures(train=arguments.run)
    before: dict[str, tuple[object, str]] = {}
    if arguments.before:
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(
                ["git", "archive", arguments.before], cwd=ROOT, capture_output=True, check=True
            ).stdout
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(folder, filter="data")
            before = House(Path(folder)).measures(train=arguments.run)
    print(f"{'':46}{'before':>18}{'now':>18}{'goal':>10}" if before else f"{'':46}{'now':>18}{'goal':>10}")
    for name, (value, goal) in now.items():
        earlier = f"{before[name][0]!s:>18}" if before else ""
        print(f"{name:46}{earlier}{value!s:>18}{goal:>10}")


if __name__ == "__main__":
    main()
