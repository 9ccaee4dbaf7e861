"""examples/extension, installed by pip into a folder and used by the command line; and packages that cannot be used."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CALL = '<tool_call>{"name": "guess", "arguments": {"number": 21}}</tool_call>'


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package in it, as pip puts it there; nothing is downloaded."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for path in (ROOT / "examples" / "extension").rglob("*"):  # pip builds in the folder itself
        if path.suffix in (".py", ".toml", ".md"):
            copy = source / path.relative_to(ROOT / "examples" / "extension")
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(path.read_bytes())
    subprocess.run([*pip, "--no-build-isolation", "--target", str(target), str(source)], check=True)
    return target


def turnwise(packages: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{packages}:{ROOT}", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "turnwise.commands.cli", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_its_task_tool_scorer_and_section_are_used_by_name(installed: Path, tmp_path: Path) -> None:
    script = json.dumps([CALL, "#### 21"])
    words = ["eval", "task=hilo", "eval.samples=2", "engine=scripted", f"engine.script={script}", "run=a", "--json"]
    done = turnwise(installed, *words, "hilo.highest=20", "scoring.options.few_guesses.each=0.1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = turnwise(installed, "show", "runs/a", cwd=tmp_path).stdout
    assert "numbers are from 1 to 20" in text, "the tool was made with the section of the run's config"
    config = (tmp_path / "runs" / "a" / "config.yaml").read_text()
    assert "hilo:\n  highest: 20" in config
    explained = turnwise(installed, "config", "hilo.highest", cwd=tmp_path).stdout
    assert "Raise it for longer episodes." in explained


def test_its_engine_plays_its_task(installed: Path, tmp_path: Path) -> None:
    done = turnwise(installed, "eval", "task=hilo", "eval.samples=4", "engine=halving", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["sources"]["hilo"]["reward"] >= 0.65, (
        "every number is found with at most seven guesses"
    )


def test_its_verb_and_its_version_are_told(installed: Path, tmp_path: Path) -> None:
    assert turnwise(installed, "hilo", "1000", cwd=tmp_path).stdout == "10 guesses find any number from 1 to 1000\n"
    text = turnwise(installed, "--help", cwd=tmp_path).stdout
    assert "games:\n  hilo          say how many guesses find any number\n" in text
    assert turnwise(installed, "--version", cwd=tmp_path).stdout.rstrip().endswith(", with hilo of turnwise-hilo 1.0")


def package(folder: Path, name: str, code: str, *, extension: str | None = None) -> Path:
    """A package whose module `NAME_module` has this code and, as EXTENSION, an extension."""
    info = folder / f"{name}-2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text(f"[turnwise.extensions]\n{extension or name} = {name}_module:EXTENSION\n")
    (folder / f"{name}_module.py").write_text(f"from turnwise.extensions import Engine, Extension\n{code}\n")
    return folder


@pytest.mark.parametrize(
    ("code", "extension", "problem"),
    [
        ("raise RuntimeError('no licence')", None, "bad_module:EXTENSION cannot be loaded: RuntimeError: no licence"),
        ("EXTENSION = 3", None, "bad_module:EXTENSION is a int, not an Extension"),
        ("EXTENSION = Extension()", "board", "a built-in extension has this name"),
    ],
)
def test_an_entry_point_that_cannot_be_used_is_one_line(
    tmp_path: Path, code: str, extension: str | None, problem: str
) -> None:
    done = turnwise(package(tmp_path / "lib", "bad", code, extension=extension), "check", cwd=tmp_path)
    named = f"the extension {extension or 'bad'!r} of the package bad 2.0: {problem}; fix or uninstall it\n"
    assert (done.returncode, done.stderr) == (2, named)


@pytest.mark.parametrize(
    ("brings", "words", "problem"),
    [
        ('verbs={"train": "x"}', ["--help"], "'train' in its verbs is already used by Turnwise itself"),
        ('verbs={"weights": "x"}', ["--help"], "'weights' in its verbs is already used by the extension 'weights'"),
        (
            'tools={"calculate": "x:y"}',
            ["eval", "eval.samples=1"],
            "'calculate' in its tools is already used by Turnwise itself",
        ),
        pytest.param(
            'scorers={"gsm8k": "x:y"}',
            ["eval", "eval.samples=1"],
            "'gsm8k' in its scorers is already used by Turnwise itself",
            marks=pytest.mark.long,
        ),
        pytest.param(
            'tools={"bash": "x:y"}',
            ["eval", "eval.samples=1"],
            "'bash' in its tools is already used by the extension 'swe'",
            marks=pytest.mark.long,
        ),
        (
            'engines={"torch": Engine("", "x:y")}',
            ["eval", "eval.samples=1"],
            "'torch' in its engines is already used by the extension 'turnwise'",
        ),
    ],
)
def test_a_name_that_is_taken_is_refused(tmp_path: Path, brings: str, words: list[str], problem: str) -> None:
    done = turnwise(package(tmp_path / "lib", "twin", f"EXTENSION = Extension({brings})"), *words, cwd=tmp_path)
    assert done.returncode == 2
    assert f"the extension 'twin' of the package twin 2.0: {problem}: rename or uninstall it" in done.stderr


def test_a_verb_that_is_none_is_one_line(tmp_path: Path) -> None:
    folder = package(tmp_path / "lib", "bad", "EXTENSION = Extension(verbs={'bad': 'bad_module'})")
    done = turnwise(folder, "--help", cwd=tmp_path)
    problem = "verb 'bad': the module bad_module has no HELP, add_arguments, run\n"
    assert (done.returncode, done.stderr) == (2, problem)
