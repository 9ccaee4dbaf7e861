"""A repository to mend: what a policy may do to it, and that tests are judged by what it mended and nothing else."""

import asyncio
import contextlib

import httpx
import pytest

from turnwise.errors import DataError
from turnwise.ext.swe.repository import Instance, LocalWorkspace, SweTests, read_instance, read_tests, run_tests
from turnwise.ext.swe.server import make_app

BROKEN = "def add(a, b):\n    return a - b\n\n\ndef same(a):\n    return a\n"
MENDED = BROKEN.replace("a - b", "a + b")
JUDGE = """import unittest

from calc.add import add, same


class AddTest(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)

    def test_same(self):
        self.assertEqual(same(1), 1)
"""
INSTANCE = Instance(
    instance_id="calc-1",
    files={"calc/__init__.py": "", "calc/add.py": BROKEN, "tests/__init__.py": "", "tests/test_add.py": JUDGE},
)
TESTS = SweTests(
    FAIL_TO_PASS=["tests.test_add.AddTest.test_add"],
    PASS_TO_PASS=["tests.test_add.AddTest.test_same"],
    files={"tests/test_add.py": JUDGE},
)
WITH_PYTEST = SweTests(
    FAIL_TO_PASS=["tests/test_add.py::AddTest::test_add"],
    PASS_TO_PASS=["tests/test_add.py::AddTest::test_same"],
    files={"tests/test_add.py": JUDGE},
    runner="pytest",
)
HOOK = """import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.outcome = "passed"
    return report
"""
PATCH = "import unittest\nunittest.TestCase.assertEqual = lambda *given: None\n"
SELECTIVE = """real = unittest.TestCase.assertEqual
def fake(self, *given):
    if type(self).__name__ == "Control":
        real(self, *given)
unittest.TestCase.assertEqual = fake
"""
CHEATS = {
    "the tests rewritten": {"tests/test_add.py": "import unittest\n\nclass AddTest(unittest.TestCase):\n    pass\n"},
    "the tests' package patches unittest": {"tests/__init__.py": PATCH},
    "a conftest that reports success": {"conftest.py": HOOK, "tests/conftest.py": HOOK},
    "a module named like a standard one": {"unittest.py": "class TestCase: pass\n", "json/__init__.py": ""},
    "sitecustomize": {"sitecustomize.py": PATCH, "usercustomize.py": PATCH},
    "pytest's settings": {"pytest.ini": "[pytest]\naddopts = --collect-only\n", "setup.cfg": "[tool:pytest]\nx=1\n"},
    "an exit": {"calc/add.py": "import os\nos._exit(0)\n"},
    "a forged report": {"calc/add.py": "import os\nos.write(1, b'{}')\nraise SystemExit(0)\n"},
    "an assertion that asserts nothing": {"calc/add.py": PATCH + BROKEN},
    "a result that notes success only": {
        "calc/add.py": "import unittest\nunittest.TestResult.addFailure = unittest.TestResult.addSuccess\n"
        "unittest.case._Outcome.testPartExecutor = None\n" + BROKEN
    },
    "a recorder that passes everything": {
        "calc/add.py": "import sys\nmain = sys.modules['__main__']\n"
        "main.Recorder._note = lambda self, test, outcome: self.found.update({test.id(): 'passed'})\n" + BROKEN
    },
    "a report that is written otherwise": {
        "calc/add.py": "import json\nreal = json.dumps\n"
        "json.dumps = lambda found, **given: real({name: 'passed' for name in found})\n" + BROKEN
    },
    "a driver that looks at nothing": {
        "calc/add.py": PATCH.replace("lambda *given", "lambda self, *given") + "import sys\n"
        "sys.modules['__main__'].same = lambda *given: True\nsys.modules['__main__'].Control = unittest.TestCase\n" + BROKEN
    },
    "built-in functions that look at nothing": {
        "calc/add.py": "import builtins, unittest\nbuiltins.all = lambda given: True\n" + SELECTIVE + BROKEN
    },
    "code of an assertion, in its place": {
        "calc/add.py": "import unittest\nreal = unittest.TestCase._baseAssertEqual\n"
        "def fake(self, first, second, msg=None):\n"
        "    if type(self).__name__ == 'Control': raise self.failureException\n"
        "unittest.TestCase.assertEqual.__code__ = fake.__code__\n" + BROKEN
    },
    "subclasses of TestCase are changed as they are made": {
        "calc/add.py": "import unittest\n"
        "def change(kind, **given):\n    kind.assertEqual = lambda *given: None\n"
        "unittest.TestCase.__init_subclass__ = classmethod(change)\n" + BROKEN
    },
    "what unittest runs tests with": {
        "calc/add.py": "import contextlib, unittest.case\n"
        "@contextlib.contextmanager\ndef part(self, test_case, subTest=False):\n"
        "    old, self.success = self.success, True\n"
        "    try:\n        yield\n    except Exception:\n"
        "        self.success = type(test_case).__name__ != 'Control'\n"
        "        if not self.success: self.result.addFailure(test_case, None)\n"
        "    self.success = self.success and old\n"
        "unittest.case._Outcome.testPartExecutor = part\n" + BROKEN
    },
    "a skip": {"calc/add.py": "import unittest\n\ndef add(a, b):\n    raise unittest.SkipTest\n\ndef same(a):\n    return a\n"},
    "a file where a folder must be": {"tests": "x", "tests/__init__.py": None, "tests/test_add.py": None},
}  # fmt: skip


def play(make, work):
    async def main():
        async with make() as pool:
            return await work(pool)

    return asyncio.run(asyncio.wait_for(main(), 120))


def test_these_tricks_do_not_work_in_the_process_of_the_tests_either(shells) -> None:
    """Where tests are not apart from the code; test_swe_forgeries.py has what is tried where they are."""
    tests = TESTS.model_copy(update={"apart": False})

    async def work(pool):
        mended = await run_tests(pool, INSTANCE, {"calc/add.py": MENDED, "tests/test_add.py": "gone"}, tests)
        found = {name: await run_tests(pool, INSTANCE, one, tests) for name, one in CHEATS.items()}
        spoilt = await run_tests(pool, INSTANCE, {"calc/add.py": MENDED.replace("return a\n", "return 0\n")}, tests)
        return mended, found, spoilt

    mended, found, spoilt = play(shells, work)
    assert mended.resolved
    assert [name for name, outcome in found.items() if outcome.resolved or outcome.f2p_count] == []
    assert (spoilt.f2p_count, spoilt.p2p_count) == (1, 0)


def test_a_file_that_tests_are_named_after_is_not_the_policys_to_change(shells) -> None:
    """Whatever it is called."""
    emptied = "import unittest\n\nclass AddTest(unittest.TestCase):\n    def test_add(self):\n        pass\n"

    async def work(pool):
        found = []
        for name in ("tests.py", "checks.py"):
            instance = Instance(instance_id="a", files={"calc/__init__.py": "", "calc/add.py": BROKEN, name: JUDGE})
            for runner, test in (
                ("unittest", f"{name[:-3]}.AddTest.test_add"),
                ("pytest", f"{name}::AddTest::test_add"),
            ):
                tests = SweTests(FAIL_TO_PASS=[test], runner=runner)
                found.append(await run_tests(pool, instance, {name: emptied}, tests))
                found.append(await run_tests(pool, instance, {name: emptied, "calc/add.py": MENDED}, tests))
        return [one.resolved for one in found]

    assert play(shells, work) == [False, True] * 4


def test_pytest_is_judged_the_same_way(shells) -> None:
    async def work(pool):
        changes = ({}, {"calc/add.py": MENDED}, CHEATS["a conftest that reports success"])
        return [await run_tests(pool, INSTANCE, one, WITH_PYTEST) for one in changes]

    before, mended, cheated = play(shells, work)
    assert (before.f2p_count, before.p2p_count) == (0, 1)
    assert mended.resolved
    assert cheated == before


def test_a_workspace_is_a_git_repository_and_says_what_was_changed(shells) -> None:
    actions = [
        ("bash", {"command": "git log --format=%s; git status --short"}),
        ("edit", {"command": "view", "path": "calc/add.py", "view_range": [1, 2]}),
        ("edit", {"command": "str_replace", "path": "calc/add.py", "old_str": "a - b", "new_str": "a + b"}),
        ("bash", {"command": "git diff --stat; python -m unittest -q 2>&1 | tail -n 1"}),
        ("edit", {"command": "insert", "path": "calc/add.py", "insert_line": 0, "new_str": "# sums"}),
        ("edit", {"command": "create", "path": "docs/new.md", "file_text": "new\n"}),
        ("bash", {"command": "rm tests/test_add.py; ln -s /usr/lib away; rm -rf .git; false"}),
        ("edit", {"command": "view", "path": "away/os-release"}),
        ("edit", {"command": "view", "path": "../../etc/passwd"}),
        ("edit", {"command": "create", "path": "/scratch/outside", "file_text": ""}),
        ("edit", {"command": "str_replace", "path": "calc/add.py", "old_str": "nowhere", "new_str": ""}),
        ("edit", {"command": "create", "path": "calc/add.py", "file_text": ""}),
        ("edit", {"command": "view", "path": "."}),
        ("bash", {"command": "python -c 'print(chr(0x1F40D) * 50_000)' > snakes; head -c 30000 /dev/zero > binary"}),
        ("bash", {"command": "cp snakes more"}),
        ("finish", {}),
    ]

    async def work(pool):
        workspace = LocalWorkspace(pool, INSTANCE)
        try:
            return [await workspace.act(*action) for action in actions]
        finally:
            await workspace.close()

    seen = play(shells, work)
    assert seen[0].text == "Start" and seen[0].facts == {"exit": 0}
    assert seen[1].text == "     1\tdef add(a, b):\n     2\t    return a - b"
    assert seen[2].facts == {"changes": {"calc/add.py": MENDED}}
    assert "1 file changed" in seen[3].text and seen[3].text.endswith("OK") and "changes" not in seen[3].facts
    assert seen[4].facts["changes"]["calc/add.py"] == "# sums\n" + MENDED
    assert seen[5].facts["changes"]["docs/new.md"] == "new\n"
    assert seen[6].text == "[exit code 1]" and seen[6].facts["changes"]["tests/test_add.py"] is None
    assert [one.failed for one in seen[7:12]] == [True] * 5
    assert all("not in the repository" in one.text for one in seen[7:10])
    assert "calc/add.py" in seen[12].text
    assert seen[13].facts["changes"]["snakes"] == "\U0001f40d" * 50_000 + "\n"
    assert "the changes are more than" in seen[14].facts["too_much"]
    assert seen[15].done and seen[15].facts == {}


def test_rows_that_make_no_sense_are_refused_by_name() -> None:
    for files in ({"../x": ""}, {"/etc/x": ""}, {"a/.git/hooks/x": ""}, {"a//b": ""}):
        with pytest.raises(DataError, match="row 3: files.*is not a path"):
            read_instance({"instance_id": "x", "files": files}, "row 3")
    with pytest.raises(DataError, match="FAIL_TO_PASS"):
        read_tests('{"FAIL_TO_PASS": []}', "row 3")
    with pytest.raises(DataError, match="row 3"):
        read_tests("no json", "row 3")


def test_the_server_s_answers_to_wrong_requests(shells, serving_in_a_thread) -> None:
    @contextlib.asynccontextmanager
    async def open_app():
        async with shells() as pool:
            yield make_app(pool, "a-token")

    def post(client, path, **body):
        answer = client.post(path, json=body)
        return answer.status_code, answer.json()

    with serving_in_a_thread(open_app) as url:
        assert httpx.post(f"{url}/start_instance", json={}).status_code == 401
        with httpx.Client(base_url=url, headers={"Authorization": "Bearer a-token"}, timeout=60) as client:
            assert client.get("/report").json()["level"] == "L3"
            assert post(client, "/start_instance", instance_id="elsewhere")[0] == 404
            assert post(client, "/process_action", sid="guessed", action={"name": "finish"})[0] == 404
            sid = post(client, "/start_instance", instance_id="calc-1", instance=INSTANCE.model_dump())[1]["sid"]
            bad = post(client, "/process_action", sid=sid, action={"name": "bash", "arguments": {"cmd": "ls"}})[1]
            assert bad["failed"] and "bad arguments for bash" in bad["observation"]
            made = {"command": "sed -i 's/a - b/a + b/' calc/add.py"}
            seen = post(client, "/process_action", sid=sid, action={"name": "bash", "arguments": made})[1]
            assert seen["facts"]["changes"] == {"calc/add.py": MENDED}
            assert post(client, "/postprocess", sid=sid)[1] == {"changed": ["calc/add.py"]}
            assert post(client, "/process_action", sid=sid, action={"name": "finish"})[0] == 409
            assert post(client, "/compute_reward", sid=sid)[0] == 422
            reward = post(client, "/compute_reward", sid=sid, tests=TESTS.model_dump())[1]
            assert reward == {"f2p_count": 1, "f2p_total": 1, "p2p_count": 1, "p2p_total": 1}
