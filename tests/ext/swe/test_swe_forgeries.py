"""Tests of a repository in one process, the policy's code in another: what people write passes, what forges does not."""

import asyncio
import importlib.util
from pathlib import Path

import pytest

from turnwise.ext.swe.repository import Instance, SuiteOutcome, SweTests, run_tests


def _load(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


forged, styles = _load("swe_forgeries"), _load("swe_styles")


def judge(shells, files, tests, changes, **options):
    """The outcome of each of the changes, a few at once."""
    instance = Instance(instance_id="x", files=files)

    async def one(pool, slots, change):
        async with slots:
            return await run_tests(pool, instance, change, tests, **options)

    async def work():
        slots = asyncio.Semaphore(3)
        async with shells() as pool:
            return await asyncio.gather(*(one(pool, slots, change) for change in changes))

    return asyncio.run(asyncio.wait_for(work(), 500))


def named_tests(runner: str, **options) -> SweTests:
    def named(names):
        parts = [name.split(".") for name in names]
        if runner == "pytest":
            return [f"tests/test_{file}.py::{kind}::{test}" for file, kind, test in parts]
        return [f"tests.test_{file}.{kind}.{test}" for file, kind, test in parts]

    return SweTests(FAIL_TO_PASS=named(forged.FAILING), PASS_TO_PASS=named(forged.PASSING), runner=runner, **options)


@pytest.mark.parametrize("runner", ["unittest", "pytest"])
def test_the_ways_people_write_tests_work_from_another_process(shells, runner) -> None:
    names = styles.UNITTESTS if runner == "unittest" else styles.PYTESTS
    tests = SweTests(FAIL_TO_PASS=names, runner=runner)
    assert judge(shells, styles.FILES, tests, [{}]) == [SuiteOutcome(len(names), len(names), 0, 0)]


SOME = (
    "_ShouldStop",
    "test files rewritten on import",
    "assertions that assert nothing",
    "every comparison is always true",
)
"""Of each sort one; the long tail of the suite tries them all."""
SOME += ("a fork that answers too", "an object of the runner's, by name", "a request for them")


def no_forgery_passes(shells, runner: str, names) -> None:
    """Some of them also break what was right; none of them mends a thing."""
    changes = [{}, {"calc/add.py": forged.RIGHT}, *(forged.FORGERIES[name] for name in names)]
    unmended, mended, *found = judge(shells, forged.FILES, named_tests(runner), changes, seconds=20.0)
    assert (unmended.f2p_count, unmended.p2p_count) == (0, len(forged.PASSING)) and mended.resolved
    assert [name for name, outcome in zip(names, found, strict=True) if outcome.f2p_count] == []


def test_no_forgery_passes_and_a_true_fix_does(shells) -> None:
    no_forgery_passes(shells, "unittest", SOME)


def test_no_forgery_passes_with_pytest_and_a_true_fix_does(shells) -> None:
    no_forgery_passes(shells, "pytest", ("pytest's skip",))


@pytest.mark.long
def test_no_forgery_of_all_passes(shells) -> None:
    assert len(forged.FORGERIES) >= 60
    no_forgery_passes(shells, "unittest", tuple(forged.FORGERIES))


@pytest.mark.long
def test_no_forgery_of_all_passes_with_pytest(shells) -> None:
    no_forgery_passes(shells, "pytest", forged.PYTEST_FORGERIES)


LIMITS = {
    "its own classes are compared by its own ==": (
        "class Point:\n    def __init__(self, x): self.x = x\n    def __eq__(self, other): return isinstance(other, Point)\n",
        "self.assertEqual(code.Point(1), code.Point(2))",
    ),
    "it does arithmetic of its own objects": (
        "class Zero:\n    def __mul__(self, other): return 0\ndef wrong(): return Zero()\n",
        "self.assertEqual(code.wrong() * 7, 0)",
    ),
    "it answers for its own methods": (
        "class Text(str):\n    def startswith(self, other): return True\ndef wrong(): return Text()\n",
        "self.assertTrue(code.wrong().startswith('right'))",
    ),
    "a test runs text that it gives": (
        "def wrong(): return \"setattr(__import__('unittest').TestCase, 'assertEqual', lambda *given: None)\"\n",
        "eval(code.wrong()); self.assertEqual(1, 2)",
    ),
}


def test_what_is_still_the_policys_word_is_what_the_docs_say(shells) -> None:
    """Limits, so that nobody takes them for safe: docs/ext/swe.md names each."""
    changes = {f"code_{at}.py": code for at, (code, _) in enumerate(LIMITS.values())}
    text = "import unittest\nclass T(unittest.TestCase):\n"
    for at, (_, line) in enumerate(LIMITS.values()):
        text += f"    def test_{at}(self):\n        import code_{at} as code\n        {line}\n"
    names = [f"tests.test_it.T.test_{at}" for at in range(len(LIMITS))]
    tests = SweTests(FAIL_TO_PASS=names, files={"tests/test_it.py": text})
    assert judge(shells, dict.fromkeys(changes, ""), tests, [changes])[0].resolved
    stop = forged.FORGERIES["_ShouldStop"]
    assert judge(shells, forged.FILES, named_tests("unittest", apart=False), [stop])[0].resolved
