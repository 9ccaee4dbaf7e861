"""Runs tests with unittest or pytest in a process that holds no code under test, and says which passed."""

import contextlib
import os
import unittest
from typing import Any


class OutcomeRecorder(unittest.TestResult):
    """The outcome of each test by its id; the first failure stands."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, bool] = {}

    def _note(self, test: Any, passed: bool) -> None:
        self.outcomes[test.id()] = self.outcomes.get(test.id(), True) and passed

    def addSuccess(self, test: Any) -> None:
        self._note(test, True)

    def addFailure(self, test: Any, err: Any) -> None:
        self._note(test, False)

    def addError(self, test: Any, err: Any) -> None:
        self._note(test, False)

    def addSkip(self, test: Any, reason: str) -> None:
        self._note(test, False)

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        self._note(test, True)

    def addUnexpectedSuccess(self, test: Any) -> None:
        self._note(test, False)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self._note(test, False)


def with_unittest(names: list[str]) -> set[str]:
    """Dotted names of tests that passed; a test that cannot be loaded has not."""
    recorder, suites = OutcomeRecorder(), []
    for name in names:  # all are loaded before any is run
        with contextlib.suppress(BaseException):  # the repository's code may raise anything while it is imported
            suites.append(unittest.TestLoader().loadTestsFromName(name))
    for suite in suites:
        with contextlib.suppress(BaseException):
            suite.run(recorder)
    return {name for name in names if recorder.outcomes.get(name)}


def with_pytest(names: list[str]) -> set[str]:
    """Node ids of tests that passed. Plug-ins that happen to be installed here are no part of the repository."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest

    outcomes: dict[str, bool] = {}

    class Plugin:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                outcomes[report.nodeid] = outcomes.get(report.nodeid, True) and report.outcome == "passed"

    options = ["-q", "-p", "no:cacheprovider", "--assert=plain", "--continue-on-collection-errors"]
    options += ["--rootdir", os.getcwd()]
    pytest.main([*options, *names], plugins=[Plugin()])
    return {name for name in names if outcomes.get(name)}
