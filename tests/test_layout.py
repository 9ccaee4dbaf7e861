"""docs/layout.md is what the files themselves say: every one of them is there, with a purpose; the wheel has them too."""

import importlib.util
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("make_layout", ROOT / "docs" / "make_layout.py")
assert SPEC is not None and SPEC.loader is not None
make_layout = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(make_layout)


def test_the_page_is_up_to_date():
    assert (ROOT / "docs" / "layout.md").read_text() == make_layout.layout(), "run: python docs/make_layout.py"


def test_every_file_says_what_it_is_for():
    assert [path for path in make_layout.tracked() if len(make_layout.purpose(ROOT / path)) < 5] == []


def test_no_purpose_is_kept_of_a_folder_that_is_gone():
    assert [folder for folder in make_layout.FOLDERS if not (ROOT / folder).is_dir()] == []


def test_every_file_of_the_package_is_in_its_wheel():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    files = subprocess.run(["git", "ls-files", "turnwise"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [Path(path).name for path in files.splitlines()]
    assert "model.safetensors" in names
    assert [name for name in names if not any(fnmatch(name, kind) for kind in ["*.py", *patterns])] == []
