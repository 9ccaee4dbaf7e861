"""What CI installs is what pyproject.toml asks for: every dependency is in the lock, within its range, with its hashes."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
LOCK = (ROOT / ".ci" / "requirements.txt").read_text()
UNLOCKED = {"torch"}
"""Which build of it a machine takes is the machine's affair, and no hash fits them all."""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, list[str]]:
    """The versions of each package; several where versions of Python differ."""
    found: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([a-z0-9-]+)==([^ ;\\]+)", LOCK, re.MULTILINE):
        found.setdefault(name, []).append(version)
    return found


def wanted() -> list[Requirement]:
    """What the package and its extra for developers need, the extras that this one names included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found, waiting = [], [*project["dependencies"], *extras["dev"]]
    while waiting:
        one = Requirement(waiting.pop())
        if one.name == project["name"]:
            waiting += [text for extra in one.extras for text in extras[extra]]
        else:
            found.append(one)
    return found


def test_every_dependency_is_locked_within_its_range():
    versions, asked = locked(), wanted()
    assert len(asked) > 25
    missing = [str(one) for one in asked if canonical(one.name) not in {*versions, *UNLOCKED}]
    assert missing == [], "run: make lock"
    outside = [
        f"{one} is locked as {version}"
        for one in asked
        for version in versions.get(canonical(one.name), [])
        if not one.specifier.contains(version, prereleases=True)
    ]
    assert outside == [], "run: make lock"


def test_every_package_of_the_lock_has_hashes_and_no_address():
    entries = re.split(r"^(?=[a-z0-9-]+==)", LOCK, flags=re.MULTILINE)[1:]
    assert len(entries) > 100
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []
    assert "://" not in LOCK and not UNLOCKED & set(locked())
