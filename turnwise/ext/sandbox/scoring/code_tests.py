"""The `code_tests` scorer: the policy's last program against the tests of the ground truth, in the sandbox.

Assertions about functions are checked where the policy's code never ran: the statements run in a clean session in which
the functions are stand-ins. A stand-in that is called with something new stops the run; the host has the call made in
the policy's session and starts over with the result. So the policy's code never sees what is expected, and cannot
change what comparing means: only plain values cross.
"""

import ast
import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal

from turnwise.errors import ConfigError, DataError, ScoringFailed
from turnwise.errors.nearest_name import unknown
from turnwise.ext.sandbox.config import SandboxConfig
from turnwise.ext.sandbox.http_schemas import RunCodeRequest, RunStatus
from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.limits import Limits
from turnwise.ext.sandbox.opening import SessionPool, open_pool, pool_settings
from turnwise.ext.sandbox.results import ExecutionStatus, Result
from turnwise.ext.sandbox.scoring.cases import CallCase, Case, ScriptCase, cases_of, literal, same_output, same_value
from turnwise.ext.sandbox.scripts import run_script
from turnwise.ext.sandbox.session import Session
from turnwise.ext.sandbox.zygote_process import SandboxLost
from turnwise.scoring.client_options import client_options
from turnwise.scoring.event_loop_resources import KeptOpen, loop_resource
from turnwise.scoring.scorer import Score
from turnwise.system.code_blocks import program, programs
from turnwise.types import CallStatus, Message, Trajectory

TOGETHER = 8
"""Tests of one trajectory under way at once; the sandbox has its own bound on what runs."""
PRELUDE = "from typing import *"
"""What programs of the usual data sets take for granted."""
FILES = "files"
"""The artifact that may hold files an episode left behind: {name: text}."""


@client_options("total", "no_code", "max_tests", "tolerance", "prelude")
async def code_tests(
    trajectory: Trajectory,
    *,
    file: str | None = None,
    total: Literal["share", "all"] = "share",
    no_code: float = 0.0,
    max_tests: int | None = None,
    tolerance: float = 1e-6,
    prelude: str = PRELUDE,
    seconds: float = 10.0,
    memory_mb: int = 512,
    preload: Sequence[str] = (),
    level: str = "auto",
    min_level: str = "L2",
    url: str | None = None,
) -> Score:
    """The share of tests that pass; with `total=all` 1 only if all do.

    The program is the last one the policy wrote, in a message or a tool call; with `file` it is that file as the
    policy's Python left it. Every test has a session of its own, none that the policy used, and what comes out is
    compared on the host. Parts: `acc` is 1 when all tests pass, `passed` is their share, `format` is 1 when there is a
    program. The other options are the sandbox's.
    """
    if total not in ("share", "all"):
        raise ConfigError(f"scoring.options, scorer code_tests: total must be 'share' or 'all', not {total!r}")
    cases = cases_of(trajectory.sample)[:max_tests]
    sandbox = sandbox_config(
        seconds=seconds, memory_mb=memory_mb, preload=preload, level=level, min_level=min_level, url=url,
    )  # fmt: skip
    try:
        pool = await opened(sandbox)
        code = last_code(trajectory) if file is None else await _written(pool, trajectory, file, sandbox)
        if code is None:
            return Score(no_code, {"acc": 0.0, "passed": 0.0, "format": 0.0})
        bench = _Bench(pool, sandbox, f"{prelude}\n{code}" if prelude else code, functions_in(code), tolerance)
        passed = await bench.count(cases)
    except SandboxLost as error:
        raise ScoringFailed(f"the sandbox failed: {error}") from error
    share, every = passed / len(cases), float(passed == len(cases))
    return Score(every if total == "all" else share, {"acc": every, "passed": share, "format": 1.0})


def last_code(trajectory: Trajectory) -> str | None:
    """The last program: in a fence or <code> tags of a message, else in a tool call; thoughts do not count."""
    for turn in reversed(trajectory.turns):
        fenced = programs(_text(turn.message))
        if fenced:
            return fenced[-1]
        calls = [call.arguments.get("code") for call in turn.message.tool_calls]
        written = [code for code in calls if isinstance(code, str)]
        if written:
            return (programs(written[-1]) or [written[-1]])[-1]
    return None


def _text(message: Message) -> str:
    """A message without its thoughts; code stays, which `visible` may leave out."""
    return message.text.rpartition("</think>")[2] if message.reasoning is not None else message.text


@dataclass(frozen=True, slots=True)
class _Bench:
    """Runs one program against its tests."""

    pool: SessionPool
    sandbox: SandboxConfig
    code: str
    functions: list[str]
    tolerance: float

    async def count(self, cases: Sequence[Case]) -> int:
        """How many pass. The first failure of the sandbox ends it."""
        slots = asyncio.Semaphore(TOGETHER)

        async def one(case: Case) -> bool:
            async with slots:
                return await self.passes(case)

        tasks = [asyncio.ensure_future(one(case)) for case in cases]
        try:
            return sum(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def passes(self, case: Case) -> bool:
        """Whether the program passes one test."""
        session = self.pool.session()
        try:
            if isinstance(case, ScriptCase):
                return await self._script(session, case)
            ready = await session.run(f"{self.code}\nNone", self.sandbox.seconds)
            if ready.status is not ExecutionStatus.OK:
                return False
            if isinstance(case, CallCase):
                return await self._call(session, case)
            clean = self.pool.session(stateless=True)
            try:
                return await holds(case.source, self.functions, session, clean, self.sandbox.seconds)
            finally:
                await clean.close()
        finally:
            await session.close()

    async def _script(self, session: Session, case: ScriptCase) -> bool:
        seconds = self.sandbox.seconds
        request = RunCodeRequest(code=self.code, language="python", stdin=case.stdin, run_timeout=seconds)
        answer = await run_script(session, request, limits_of(self.sandbox), seconds)
        if answer.status is RunStatus.SandboxError:
            raise SandboxLost(answer.message)
        ran = answer.run_result
        return ran is not None and ran.return_code == 0 and same_output(ran.stdout or "", case.stdout, self.tolerance)

    async def _call(self, session: Session, case: CallCase) -> bool:
        function = case.function if case.function in self.functions else f"Solution().{case.function}"
        result = await session.run(call_source(function, repr(case.arguments)), self.sandbox.seconds)
        if result.status is not ExecutionStatus.OK:
            return False
        try:
            returned = literal("None" if result.value is None else result.value)
        except ValueError:
            return False
        # Some data sets put the one result into a list.
        wrapped = isinstance(case.expected, list) and len(case.expected) == 1 and not isinstance(returned, list | tuple)
        return same_value(returned, case.expected[0] if wrapped else case.expected, self.tolerance)


async def _written(pool: SessionPool, trajectory: Trajectory, file: str, sandbox: SandboxConfig) -> str | None:
    """A file of the episode: recorded, or made again by running the policy's Python in a session of its own."""
    recorded = trajectory.artifacts.get(FILES, {})
    if file in recorded:
        return str(recorded[file])
    ran = (CallStatus.OK, CallStatus.ERROR, CallStatus.CRASHED, CallStatus.TIMEOUT)
    calls = [record.call.arguments.get("code") for record in trajectory.calls if record.status in ran]
    cells = [code for code in calls if isinstance(code, str)]
    if not cells:
        return None
    session = pool.session()
    try:
        for cell in cells:
            await session.run(program(cell), sandbox.seconds)
        request = RunCodeRequest(code="", language="python", fetch_files=[file])
        answer = await run_script(session, request, limits_of(sandbox), sandbox.seconds)
    finally:
        await session.close()
    return answer.files[file].decode(errors="replace") if file in answer.files else None


OUTPUT = 1_000_000
"""Characters of what a test may print; programs are compared with all of it."""


def sandbox_config(
    *,
    seconds: float = SandboxConfig.seconds,
    memory_mb: int = SandboxConfig.memory_mb,
    preload: Sequence[str] = (),
    level: str = SandboxLevel.auto.name,
    min_level: str = SandboxLevel.L2.name,
    url: str | None = None,
) -> SandboxConfig:
    """The sandbox that a scorer's options ask for."""
    if isinstance(preload, str):
        raise ConfigError(f"scoring.options, scorer code_tests: preload must be a list, not {preload!r}")
    return SandboxConfig(
        level=_level(level), min_level=_level(min_level), seconds=seconds, memory_mb=memory_mb, preload=list(preload),
        url=url,
    )  # fmt: skip


def limits_of(config: SandboxConfig) -> Limits:
    """What one session of a test may use."""
    return pool_settings(config, OUTPUT).limits


async def opened(sandbox: SandboxConfig) -> SessionPool:
    """The pool of these settings in the running event loop; `close_loop_resources` closes it."""
    resource: KeptOpen[SessionPool] = loop_resource(
        KeptOpen, ("code", repr(sandbox)), lambda: KeptOpen(lambda: _pool(sandbox))
    )
    return await resource.opened()


def _pool(sandbox: SandboxConfig) -> AbstractAsyncContextManager[SessionPool]:
    return open_pool(sandbox, OUTPUT)


def _level(name: str) -> SandboxLevel:
    if name not in SandboxLevel.__members__:
        raise ConfigError(f"scoring.options, scorer code_tests: {unknown('level', name, SandboxLevel.__members__)}")
    return SandboxLevel[name]


MAX_CALLS = 200
"""Of functions under test by one assertion case."""
MAX_CODE = 100_000
"""Characters of a program whose functions are looked for."""
_CLEAN = """
import builtins
class Ask(BaseException):
    pass
def stand_in(name):
    def call(*args, **kwargs):
        key = repr((name, args, kwargs))
        if key not in known:
            raise Ask(key)
        raised, text = known[key]
        if raised:
            kind = getattr(builtins, text, None)
            known_kind = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if known_kind else RuntimeError)("raised by the function under test")
        return eval(text, {"inf": float("inf"), "nan": float("nan")})
    return call
space = {"__name__": "__main__", **{name: stand_in(name) for name in names}}
try:
    exec(compile(test, "<test>", "exec"), space)
    outcome = "passed"
except Ask as error:
    outcome = "ask" + error.args[0]
except BaseException as error:
    outcome = "failed"
"""


def functions_in(code: str) -> list[str]:
    """The functions a program defines at its top level; none when it does not parse or is far too long."""
    if len(code) > MAX_CODE:
        return []
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return sorted({node.name for node in body if isinstance(node, ast.FunctionDef)})


def call_source(function: str, args: str, kwargs: str = "{}") -> str:
    """A cell whose value is what the function returns; an array becomes a list."""
    constants = "{'inf': float('inf'), 'nan': float('nan')}"  # a repr may hold these
    called = f"({function})(*eval({args!r}, {constants}), **eval({kwargs!r}, {constants}))"
    return f"(lambda value: value.tolist() if type(value).__module__ == 'numpy' else value)({called})"


async def holds(source: str, functions: list[str], theirs: Session, clean: Session, seconds: float) -> bool:
    """Whether the statements raise nothing. `theirs` has run the policy's code, `clean` never runs any of it."""
    answers: dict[str, tuple[bool, str]] = {}
    left = seconds  # of all calls together
    for _ in range(MAX_CALLS):
        cell = f"known, names, test = {answers!r}, {functions!r}, {source!r}\n{_CLEAN}\noutcome"
        outcome = _outcome(await clean.run(cell, seconds))
        if not outcome.startswith("ask"):
            return outcome == "passed"
        key = outcome.removeprefix("ask")
        try:
            name, args, kwargs = literal(key)
        except ValueError as error:
            if answers:  # perhaps made of what the functions returned, which may be anything
                return False
            raise DataError(f"an assert_case calls a function with more than plain values: {key[:120]}") from error
        result = await theirs.run(call_source(name, repr(args), repr(kwargs)), left)
        left -= result.seconds
        answer = _read(result)
        if answer is None or left <= 0:
            return False
        answers[key] = answer
    return False


def _outcome(result: Result) -> str:
    """What the clean session found; "failed" when the statements took too long, or too much, with the values given."""
    try:
        return str(literal(result.value or "")) if result.status is ExecutionStatus.OK else "failed"
    except ValueError:  # a text so long that its middle was left out
        return "failed"


def _read(result: Result) -> tuple[bool, str] | None:
    """(raised?, the value or the exception's name); None when nothing of use came back."""
    if result.status is ExecutionStatus.ERROR and result.failure is not None:
        return True, result.failure.kind
    if result.status is not ExecutionStatus.OK:
        return None
    text = "None" if result.value is None else result.value
    try:
        literal(text)
    except ValueError:
        return None
    return False, text
