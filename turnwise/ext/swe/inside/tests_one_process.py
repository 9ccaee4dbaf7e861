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
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any


class OutcomeTextRecorder(unittest.TestResult):
    """The outcome of each test by its id; the first failure stands. In words, which no name stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def _note(self, test: Any, outcome: str) -> None:
        if self.found.get(test.id(), "passed") == "passed":
            self.found[test.id()] = outcome

    def addSuccess(self, test: Any) -> None:
        self._note(test, "passed")

    def addFailure(self, test: Any, err: Any) -> None:
        self._note(test, "failed")

    def addError(self, test: Any, err: Any) -> None:
        self._note(test, "failed")

    def addSkip(self, test: Any, reason: str) -> None:
        self._note(test, "skipped")

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        self._note(test, "passed")

    def addUnexpectedSuccess(self, test: Any) -> None:
        self._note(test, "failed")

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self._note(test, "failed")


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
    recorder, loader, runner = OutcomeTextRecorder(), unittest.TestLoader(), unittest.TestSuite.run
    for name in names:
        try:
            suite = loader.loadTestsFromName(name)
        except BaseException:  # the repository's code may raise anything while it is imported
            continue
        with contextlib.suppress(BaseException):
            runner(suite, recorder)
    controls = OutcomeTextRecorder()
    runner(unittest.TestLoader().loadTestsFromTestCase(Control), controls)
    if list(controls.found.values()) != ["failed"] * 3:
        return {}
    return {name: recorder.found[name] for name in names if name in recorder.found}


def with_pytest(names: list[str]) -> dict[str, str]:
    """Outcomes by node id. Plug-ins that happen to be installed here are no part of the repository."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest

    outcomes: dict[str, str] = {}

    class Plugin:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                earlier = outcomes.get(report.nodeid, "passed")
                outcomes[report.nodeid] = report.outcome if earlier == "passed" else earlier

    options = ["-q", "-p", "no:cacheprovider", "--rootdir", os.getcwd(), "--continue-on-collection-errors"]
    pytest.main([*options, *names], plugins=[Plugin()])
    return {name: outcomes[name] for name in names if name in outcomes}


def deciders(runner: str) -> list[Any]:
    """Modules and classes that decide whether a test passed."""
    import builtins

    if runner == "pytest":
        import pytest  # noqa: F401  # with all that it loads
    tops = ("unittest", "pytest", "_pytest", "pluggy")
    modules = [builtins, os, contextlib]
    modules += [sys.modules[name] for name in sorted(sys.modules) if name.split(".")[0] in tops]
    things: list[Any] = [*modules, OutcomeTextRecorder, Control]
    for module in modules:
        things += [
            value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__
        ]
    return things


def comparison(runner: str) -> Callable[[], bool]:
    """Whether every function that decides is as it is now, to be asked later.

    It keeps what it needs in cells: the code under test may replace any name that it finds in a module, and code in a
    function. Classes have got no more functions; modules may have.
    """
    look_into, function, module, wrapped = vars, FunctionType, ModuleType, (staticmethod, classmethod, property)
    kind_of, is_a, can_call = type, isinstance, callable

    def facts(value: Any) -> list[Any]:
        inner = value.fget if kind_of(value) is property else value.__func__ if is_a(value, wrapped) else value
        if kind_of(inner) is not function:
            return [value]
        cells = [cell.cell_contents for cell in inner.__closure__ or ()]
        codes = [member.__code__ for member in (inner, *cells) if kind_of(member) is function]
        return [value, inner, inner.__defaults__, *cells, *codes]

    def look(thing: Any) -> dict[str, list[Any]]:
        held = [*look_into(thing).items()]
        return {name: facts(member) for name, member in held if can_call(member) or is_a(member, wrapped)}

    before = [(thing, kind_of(thing) is module, look(thing)) for thing in deciders(runner)]

    def is_same() -> bool:
        for thing, may_grow, old in before:
            new = look(thing)
            if not may_grow and new.keys() != old.keys():
                return False
            for name, facts_then in old.items():
                then, now = [*facts_then], [*new.get(name, [])]
                while then and now and then[-1] is now[-1]:
                    then.pop(), now.pop()
                if then or now:
                    return False
        return True

    return is_same


def main() -> None:
    order = json.loads(sys.stdin.buffer.readline())
    secret = sys.stdin.buffer.readline().strip()
    say, leave, write = os.dup(1), os._exit, os.write
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    is_same = comparison(order["runner"])
    sys.modules["__main__"] = ModuleType("__main__")  # nothing of the driver has a name that can be imported
    sys.path.insert(0, os.getcwd())
    names = order["tests"]
    results = (with_pytest if order["runner"] == "pytest" else with_unittest)(names)
    outcomes = [b"p" if results.get(name) == "passed" else b"f" for name in names] if is_same() else []
    data = secret + b"".join(outcomes) + b"\n"
    while data:
        data = data[write(say, data) :]
    leave(0)


if __name__ == "__main__":
    main()
