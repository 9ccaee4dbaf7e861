"""Code against tests in the real sandbox: what passes, what cheats, what is lost, what is left behind."""

import asyncio
import json
import os
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from turnwise.errors import ConfigError, DataError, ScoringFailed
from turnwise.ext.sandbox.pool import SandboxPool
from turnwise.ext.sandbox.scoring import code_tests as code_sandbox
from turnwise.ext.sandbox.scoring.cases import cases_of, literal, same_output, same_value
from turnwise.ext.sandbox.scoring.code_tests import code_tests, sandbox_config
from turnwise.ext.sandbox.zygote_process import SandboxUnavailable
from turnwise.scoring.event_loop_resources import close_loop_resources
from turnwise.scoring.scorer import Score
from turnwise.system.code_blocks import programs
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Message,
    Role,
    Sample,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)

ADD = "def add(a, b):\n    return a + b"
SUMS = {"assert_case": ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]}
SCRIPT = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}


def trajectory(code: str | None, truth: Any) -> Trajectory:
    message = Message(Role.ASSISTANT, "I give up." if code is None else f"Here:\n```python\n{code}\n```\n")
    turn = Turn(0, message, FinishReason.STOP, 0, 1, 1)
    return Trajectory(Sample("s", (), "apps", truth), 0, 0, [message], [turn], [], StopReason.ANSWERED, 0.0)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One event loop, and so one pool, for all tests; closed as the service closes it."""
    made = asyncio.new_event_loop()
    try:
        made.run_until_complete(code_sandbox.opened(SANDBOX))
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield made
    made.run_until_complete(close_loop_resources())
    made.close()


SANDBOX = sandbox_config(seconds=5.0)


class Ask:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    def do(self, work: Coroutine[Any, Any, Score]) -> Score:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    def __call__(self, code: str | None, truth: Any, **options: Any) -> Score:
        return self.do(code_tests(trajectory(code, truth), **{"seconds": SANDBOX.seconds, **options}))


@pytest.fixture
def score(loop: asyncio.AbstractEventLoop) -> Ask:
    return Ask(loop)


def test_programs_by_what_they_print(score: Ask) -> None:
    right = "a, b = map(int, input().split())\nprint(a + b)"
    assert score(right, SCRIPT) == Score(1.0, {"acc": 1.0, "passed": 1.0, "format": 1.0})
    assert score(right, json.dumps(SCRIPT)).reward == 1.0
    assert score("print(3)", SCRIPT) == Score(0.5, {"acc": 0.0, "passed": 0.5, "format": 1.0})
    assert score("print(3)", SCRIPT, total="all").reward == 0.0
    assert score("print(3)", SCRIPT, max_tests=1).reward == 1.0
    assert score("print(3)\nraise SystemExit(1)", SCRIPT).reward == 0.0, "a program that fails did not pass"
    assert score(None, SCRIPT, no_code=-1.0) == Score(-1.0, {"acc": 0.0, "passed": 0.0, "format": 0.0})
    assert score("def (", SCRIPT).reward == 0.0


def test_functions_by_what_they_return(score: Ask) -> None:
    calls = {"fn_name": "add", "inputs": [[1, 2], "3\n4", [[1], [2]]], "outputs": [3, "7", [1, 2]]}
    assert score(ADD, calls).reward == 1.0
    assert score("class Solution:\n    def add(self, a: List[int], b):\n        return a + b", calls).reward == 1.0
    assert score("def add(a, b):\n    return str(a + b)", calls).reward == 0.0
    assert score("def plus(a, b):\n    return a + b", calls).reward == 0.0
    half = {"fn_name": "half", "inputs": [[1]], "outputs": [[0.5]]}
    assert score("def half(x):\n    return x / 2", half).reward == 1.0


def test_assertions(score: Ask) -> None:
    assert score(ADD, SUMS).reward == 1.0
    assert score("def add(a, b):\n    return 3", SUMS).reward == 0.5
    more = [
        "x = [1]\nassert add(x, x) == [1, 1]",
        "assert add(add(1, 2), add(3, 4)) == 10",
        "assert abs(add(0.1, 0.2) - 0.3) < 1e-9",
        "assert add(float('inf'), 1) == float('inf')",
        "try:\n    add(1, 'a')\nexcept TypeError:\n    pass\nelse:\n    raise AssertionError",
        "def check(candidate):\n    for n in range(5):\n        assert candidate(n, b=n) == 2 * n\ncheck(add)",
    ]
    assert score(ADD, {"assert_case": more}).reward == 1.0
    assert score("def add(a, b):\n    return a * b", {"assert_case": more}).reward == 1 / 6, "inf * 1 is inf"


@pytest.mark.parametrize(
    "code",
    [
        "class Same:\n    __eq__ = __lt__ = __ge__ = lambda self, other: True\ndef add(a, b):\n    return Same()",
        "class Three(int):\n    def __eq__(self, other): return True\ndef add(a, b):\n    return Three(0)",
        "import sys\ndef add(a, b):\n    sys.exit(0)",
        "import os\ndef add(a, b):\n    os._exit(0)",
        "import builtins\nbuiltins.AssertionError = builtins.exec = builtins.eval = lambda *a: (1, 2)\ndef add(a, b):\n    return 0",
        "import sys\ndef add(a, b):\n    frame = sys._getframe()\n    while frame.f_back:\n        frame = frame.f_back\n    return frame.f_locals.get('test')",
        "def add(a, b):\n    import gc\n    return [o for o in gc.get_objects() if isinstance(o, str) and 'assert add' in o]",
        "def add(a, b):\n    raise SystemExit('passed')",
        "def add(a, b):\n    print('passed')\n    return 'passed'",
        "def add(a, b):\n    while True:\n        pass",
        "outcome = 'passed'\nknown = {}\ndef add(a, b):\n    return None",
        "add = 3",
    ],
)
def test_cheating_does_not_pass(score: Ask, code: str) -> None:
    assert score(code, SUMS, seconds=1.0).reward == 0.0


def test_a_program_sees_no_expected_output(score: Ask) -> None:
    look = """
import gc
mark = "".join(["sec", "ret"])
inside = (list(one.values()) if isinstance(one, dict) else one for one in gc.get_objects() if isinstance(one, (dict, list, tuple, set)))
print(*{text for many in inside for text in many if isinstance(text, str) and text.startswith(mark) and text[6:].isdigit()})
"""
    assert score("secrets = ['secret77']\n" + look, {"inputs": [""], "outputs": ["secret77"]}).reward == 1.0, (
        "it looks well"
    )
    assert score(look, {"inputs": [""], "outputs": ["secret5417"]}).reward == 0.0


def test_tests_do_not_see_each_other(score: Ask) -> None:
    once = "import os\nfirst = not os.path.exists('seen')\nopen('seen', 'w').close()\nprint(first)"
    assert score(once, {"inputs": ["", "", ""], "outputs": ["True"] * 3}).reward == 1.0


def test_a_file_that_the_policys_python_left(score: Ask) -> None:
    episode = trajectory(None, {"inputs": ["x"], "outputs": ["x"]})
    cells = ["text = 'print(input())'", "open('solution.py', 'w').write(text)"]
    episode.turns[0].calls = [
        CallRecord(ToolCall(f"c{n}", "python", {"code": c}), CallStatus.OK, 0.1) for n, c in enumerate(cells)
    ]
    options: dict[str, Any] = {"seconds": SANDBOX.seconds, "file": "solution.py"}
    assert score.do(code_tests(episode, **options)).reward == 1.0
    assert score.do(code_tests(episode, **{**options, "file": "other.py"})).parts["format"] == 0.0
    episode.artifacts["files"] = {"solution.py": "print('y')"}
    assert score.do(code_tests(episode, **options)).reward == 0.0, "the recorded file is the one that counts"


def test_a_lost_sandbox_is_no_verdict() -> None:
    async def main() -> Score:
        pool = await code_sandbox.opened(SANDBOX)
        await pool.close()
        return await code_tests(trajectory(ADD, SUMS), seconds=SANDBOX.seconds)

    with pytest.raises(ScoringFailed, match="the sandbox failed"):
        asyncio.run(main())


def test_the_pool_ends_with_its_loop_and_opens_again() -> None:
    """Nobody closes it here: asyncio.run cancels the task that keeps it."""

    async def main() -> tuple[float, int]:
        found = await code_tests(trajectory(ADD, SUMS), seconds=SANDBOX.seconds)
        pool = await code_sandbox.opened(SANDBOX)
        assert isinstance(pool, SandboxPool) and pool._zygote is not None
        return found.reward, pool._zygote.process.pid

    for _ in range(2):
        reward, pid = asyncio.run(main())
        assert reward == 1.0
        assert not os.path.exists(f"/proc/{pid}")


def test_options_that_cannot_be_used(score: Ask) -> None:
    for options, complaint in (
        ({"total": "sum"}, "total"),
        ({"level": "L9"}, "unknown level"),
        ({"preload": "numpy"}, "preload"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            score(ADD, SUMS, **options)


@pytest.mark.parametrize(
    "truth",
    [
        None, "not json", "[]", {}, {"inputs": ["1"], "outputs": []}, {"inputs": [1], "outputs": [2]}, {"assert_case": ["assert ("]},
        {"assert_case": [1]}, {"inputs": ["x y"], "outputs": [1], "fn_name": "f"}, {"inputs": ["1"], "outputs": ["1"], "fn_name": "f("},
    ],
)  # fmt: skip
def test_truths_without_tests_are_errors(truth: Any) -> None:
    with pytest.raises(DataError, match="sample 's'"):
        cases_of(Sample("s", (), "apps", truth))


def test_assertions_about_things_that_cannot_cross_are_errors(score: Ask) -> None:
    big = "def grow(x):\n    return [x] * 20_000"
    assert score(big, {"assert_case": ["assert grow(grow(1))"]}).reward == 0.0, "a policy cannot stop the run"
    odd = "def make(x):\n    return object()"
    assert score(odd, {"assert_case": ["assert make(make(1))"]}).reward == 0.0
    with pytest.raises(DataError, match="more than plain values"):
        score("def apply(f):\n    return f(1)", {"assert_case": ["assert apply(lambda x: x) == 1"]})


def test_outputs_are_compared_on_the_host() -> None:
    assert same_output("3 \n\n", "3", 0.0)
    assert same_output("0.3000000001", "0.3", 1e-6) and not same_output("0.31", "0.3", 1e-6)
    assert not same_output("3\n4", "3 4", 1e-6) and not same_output("10000001", "10000000", 1e-6)
    assert not same_output("", "3", 1e-6) and not same_output("3.x", "3.0", 1e-6)
    assert same_value((1, [2.0]), [1, [2]], 1e-6) and same_value({1: "a"}, {"1": "a"}, 0.0)
    assert not same_value(True, 1, 0.0) and not same_value("1", 1, 0.0) and not same_value([1], [1, 2], 0.0)
    assert not same_value(10**400, 1.0, 1e-6) and same_value(float("inf"), float("inf"), 0.0)


def test_only_plain_values_cross() -> None:
    assert literal("[1, -inf, {'a': (None, True)}]") == [1, float("-inf"), {"a": (None, True)}]
    for text in ("f(1)", "x", "__import__('os')", "[" * 5000, "1 if x else 2", "'" * 3, "9" * 5000):
        with pytest.raises(ValueError):
            literal(text)


def test_hostile_text_takes_no_time() -> None:
    for text in ("```x\n" * 100_000, "<code>" * 100_000, "```\n" * 100_001, "</code>" * 100_000, "`" * 1_000_000):
        assert set(programs(text)) <= {""}
    assert programs("```python title=x\na\n```") == ["a"] and programs("```a``` b\n```\nc\n```") == ["c"]
