"""docs/install.md says what pyproject.toml has: the Pythons, the extras, the command."""

import importlib
import re
import tomllib
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / "docs" / "install.md").read_text()


def test_the_page_has_every_extra_and_no_other() -> None:
    table = PAGE.partition("## Extras")[2]
    named = {name for row in re.findall(r"(?m)^\| (`.*?) \|", table) for name in re.findall(r"`(\w+)`", row)}
    assert named == PROJECT["optional-dependencies"].keys()


def test_the_page_has_the_pythons_and_the_range_of_torch() -> None:
    named = set(re.findall(r"\b3\.\d+\b", PAGE.partition("\n\n")[2].splitlines()[0]))
    allowed = SpecifierSet(PROJECT["requires-python"])
    assert named == {f"3.{minor}" for minor in range(30) if allowed.contains(f"3.{minor}.1")}
    torch = next(text for text in PROJECT["dependencies"] if text.startswith("torch"))
    assert f'pip install "{torch}"' in PAGE


def test_the_command_and_the_files_of_the_metadata_are_there() -> None:
    assert PROJECT["name"] == "turnwise" and list(PROJECT["scripts"]) == [
        "turnwise"
    ]  # what `uvx --from . turnwise` asks
    module, _, function = PROJECT["scripts"]["turnwise"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert all((ROOT / name).is_file() for name in (PROJECT["readme"], *PROJECT["license-files"]))


def test_the_limit_of_the_plain_install_is_near_what_the_page_says() -> None:
    packages, size = re.search(r"a plain install with it \| (\d+) \| ([\d.]+) GB", PAGE).groups()  # type: ignore[union-attr]
    script = (ROOT / ".ci" / "pythons").read_text()
    most = {name: int(value) for name, value in re.findall(r"(?m)^most_(\w+)=(\d+)$", script)}
    assert int(packages) <= most["packages"] <= int(packages) + 3
    assert 1000 * float(size) <= most["megabytes"] <= 1050 * float(size)
