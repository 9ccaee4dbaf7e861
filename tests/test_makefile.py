"""What the make verbs install: each what it needs, everything for the tests, and CI one environment for all."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEEDS = {"eval": '"."', "train": '"."', "board": '".[board]"', "train-images": '".[examples]"', "test": '".[dev]"'}

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def planned(folder: Path, *words: str) -> str:
    """The commands that make would run in this folder."""
    shutil.copy(ROOT / "Makefile", folder)
    (folder / ".ci").mkdir(exist_ok=True)
    for name in ("pyproject.toml", ".ci/build.txt", ".ci/requirements.txt"):
        shutil.copy(ROOT / name, folder / name)
    ours = ("LOCKED", "CPU_TORCH", "ARGS", "PYTHON")  # of the make that may have started these tests
    outer = {name for name in os.environ if name in ours or name.startswith(("MAKE", "MFLAGS"))}
    clean = {name: value for name, value in os.environ.items() if name not in outer}
    make = subprocess.run(["make", "-n", *words], cwd=folder, env=clean, capture_output=True, text=True, check=True)
    return make.stdout


@pytest.mark.parametrize("verb", NEEDS)
def test_a_verb_installs_what_it_needs_and_is_not_silent(verb: str, tmp_path: Path) -> None:
    (install,) = [
        line for line in planned(tmp_path, verb).splitlines() if "pip install" in line and "--editable" in line
    ]
    assert install.endswith(NEEDS[verb]) and "--quiet" not in install


def test_where_everything_is_installed_nothing_more_is(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    stamp = tmp_path / ".venv" / ".ready"
    stamp.touch()
    os.utime(stamp, (2**32, 2**32))  # newer than what the next line copies
    assert "pip install" not in planned(tmp_path, "train", "board", "test")


def test_what_is_locked_is_one_environment(tmp_path: Path) -> None:
    text = planned(tmp_path, "LOCKED=1", "setup", "train", "check", "test")
    assert text.count("-m venv .venv") == 1 and text.count('--editable ".[dev]"') == 1 and '--editable "."' not in text


def test_the_address_of_the_cpu_build_goes_to_pip(tmp_path: Path) -> None:
    text = planned(tmp_path, "train", "CPU_TORCH=http://builds.test/cpu")
    assert '--extra-index-url http://builds.test/cpu --editable "."' in text
