"""Every file of the package is in its wheel."""

import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_file_of_the_package_is_in_its_wheel():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    files = subprocess.run(["git", "ls-files", "turnwise"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [Path(path).name for path in files.splitlines()]
    assert "model.safetensors" in names
    assert [name for name in names if not any(fnmatch(name, kind) for kind in ["*.py", *patterns])] == []
