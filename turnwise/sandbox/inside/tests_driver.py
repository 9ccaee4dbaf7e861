"""Runs named tests of a repository and says how each went, as a script inside a shell session that nobody used before.

The code under test is untrusted and runs in this process. What it prints is not read; a result counts only with a
secret that came on standard input, only at the end, and only if what decides about tests is as it was before.
"""

import contextlib
import json
import os
import sys
import unittest
import unittest.case
import unittest.loader
import unittest.suite
from types import ModuleType
from typing import Any

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


class Recorder(unittest.TestResult):
    """The outcome of each test by its id; the first failure stands."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def _note(self, test: Any, outcome: str) -> None:
        if self.found.get(test.id(), PASSED) == PASSED:
            self.found[test.id()] = outcome

    def addSuccess(self, test: Any) -> None:
        self._note(test, PASSED)

    def addFailure(self, test: Any, err: Any) -> None:
        self._note(test, FAILED)

    def addError(self, test: Any, err: Any) -> None:
        self._note(test, FAILED)

    def addSkip(self, test: Any, reason: str) -> None:
        self._note(test, SKIPPED)

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        self._note(test, PASSED)

    def addUnexpectedSuccess(self, test: Any) -> None:
        self._note(test, FAILED)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self._note(test, FAILED)


class Control(unittest.TestCase):
    """Tests that must fail, run after the others: what forges results forges these."""

    def test_equal(self) -> None:
        self.assertEqual(1, 2)

    def test_true(self) -> None:
        self.assertTrue(0)

    def test_raises(self) -> None:
        with self.assertRaises(ValueError):
            pass


def with_unittest(names: list[str]) -> dict[str, str]:
    """Outcomes by dotted name; a test that cannot be loaded has failed."""
    recorder, loader, runner = Recorder(), unittest.TestLoader(), unittest.TestSuite.run
    for name in names:
        try:
            suite = loader.loadTestsFromName(name)
        except BaseException:  # the repository's code may raise anything while it is imported
            continue
        with contextlib.suppress(BaseException):
            runner(suite, recorder)
    controls = Recorder()
    runner(unittest.TestLoader().loadTestsFromTestCase(Control), controls)
    if list(controls.found.values()) != [FAILED] * 3:
        return {}
    return {name: recorder.found[name] for name in names if name in recorder.found}


def with_pytest(names: list[str]) -> dict[str, str]:
    """Outcomes by node id. Plug-ins that happen to be installed here are no part of the repository."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest

    found: dict[str, str] = {}

    class Plugin:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != PASSED:
                known = found.get(report.nodeid, PASSED)
                found[report.nodeid] = report.outcome if known == PASSED else known

    options = ["-q", "-p", "no:cacheprovider", "--rootdir", os.getcwd(), "--continue-on-collection-errors"]
    pytest.main([*options, *names], plugins=[Plugin()])
    return {name: found[name] for name in names if name in found}


def deciders(runner: str) -> list[Any]:
    """What must be as it was: the modules and classes that decide whether a test passed."""
    import builtins

    found: list[Any] = [builtins, os, unittest.case, unittest.loader, unittest.suite, unittest.TestCase]
    found += [unittest.TestResult, unittest.TestSuite, unittest.TestLoader, Recorder, Control]
    if runner == "pytest":
        import _pytest.python
        import _pytest.reports
        import _pytest.runner

        found += [_pytest.python, _pytest.python.Function, _pytest.reports, _pytest.reports.TestReport, _pytest.runner]
    return found


def snapshot(things: list[Any]) -> list[dict[str, int]]:
    return [{name: id(value) for name, value in vars(thing).items()} for thing in things]


def same(before: list[dict[str, int]], things: list[Any]) -> bool:
    """Whether nothing that was there has been replaced; modules may have got more names since."""
    return all(
        id(vars(thing).get(name)) == value
        for known, thing in zip(before, things, strict=True)
        for name, value in known.items()
        if name not in ("_", "__warningregistry__") and not isinstance(vars(thing).get(name), ModuleType)
    )


def main() -> None:
    order = json.loads(sys.stdin.buffer.readline())
    secret = sys.stdin.buffer.readline().strip()
    say, leave, write = os.dup(1), os._exit, os.write
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    things = deciders(order["runner"])
    before = snapshot(things)
    sys.path.insert(0, os.getcwd())
    found = (with_pytest if order["runner"] == "pytest" else with_unittest)(order["tests"])
    if not same(before, things):
        found = {}
    data = secret + json.dumps(found).encode() + b"\n"
    while data:
        data = data[write(say, data) :]
    leave(0)


if __name__ == "__main__":
    main()
