"""Engines come from the table: a sampler of one file and one line is planned and evaluated, and nobody asks for names."""

import ast
import contextlib
from pathlib import Path

import pytest

import turnwise
from turnwise import extensions
from turnwise.commands.cli import main
from turnwise.ext import table
from turnwise.extensions import Engine, Extension

PACKAGE = Path(next(iter(turnwise.__path__)))
CODE = '''
"""A sampler that says four."""

from turnwise.engines.opener import Opener, OpenSampler
from turnwise.engines.samplers.scripted import scripted_sampler


class FourOpener(Opener):
    async def open(self, config, renderer, say):
        say("four engine: opened")
        return OpenSampler(scripted_sampler(renderer, lambda request: "#### 4"), threads=1)

    async def check(self, config):
        return "four engine: it is there"
'''


def test_a_sampler_is_one_file_and_one_line_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "four_engine.py").write_text(CODE)
    line = Engine("Says four.", f"{tmp_path}/four_engine.py:FourOpener", trains=False)
    monkeypatch.setitem(table.OURS, "four", Extension(engines={"four": line}))
    with contextlib.chdir(tmp_path):
        assert main(["config", "engine.name"]) == 0 and "Says four." in capsys.readouterr().out
        assert main(["check", "engine=four"]) == 0
        assert "four engine: it is there" in " ".join(capsys.readouterr().out.split())
        assert main(["eval", "engine=four", "eval.samples=2", "run=a"]) == 0
        assert "engine       four, model tiny" in Path("runs/a/plan.txt").read_text()
        assert "four engine: opened" in Path("runs/a/log.txt").read_text()
        assert main(["train", "engine=four", "training.steps=1"]) == 2
        assert "engine=four gives neither" in " ".join(capsys.readouterr().err.split())
        assert main(["eval", "engine=for", "eval.samples=2"]) == 2
        assert "did you mean 'four'?" in capsys.readouterr().err


def test_no_file_of_the_core_but_the_table_names_an_engine_of_a_guest_or_compares_names() -> None:
    names = set(extensions.engines())
    guests = {name for guest in ("vllm", "sglang") for name in table.OURS[guest].engines}
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        if place.parts[0] == "ext" or place == Path("extensions.py"):  # which has the core's own
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in guests:
                wrong.append(f"{place}:{node.lineno} names {node.value}")
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                asks = any(ast.unparse(side).endswith("engine.name") for side in sides)
                values = {leaf.value for side in sides for leaf in ast.walk(side) if isinstance(leaf, ast.Constant)}
                if asks and values & names:
                    wrong.append(f"{place}:{node.lineno} compares {ast.unparse(node)}")
    assert wrong == []


def test_every_engine_of_the_table_has_its_opener_and_reads_keys_that_exist() -> None:
    from turnwise.config.knobs import knobs_of
    from turnwise.config.sections import full_config
    from turnwise.engines.opener import Opener
    from turnwise.system.plugins import load

    knobs = knobs_of(full_config())
    for name, engine in {**extensions.engines(), "of the user's": extensions.PLUGIN_ENGINE}.items():
        assert issubclass(load(engine.opener, "engine"), Opener), name
        assert [key for key in engine.reads if key not in knobs] == [], name
