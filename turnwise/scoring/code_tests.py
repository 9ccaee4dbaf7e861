"""The `code_tests` scorer: the policy's last program against the tests of the ground truth, in the sandbox."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from turnwise.code_blocks import program, programs
from turnwise.config import SandboxConfig
from turnwise.errors import ConfigError, ScoringFailed
from turnwise.sandbox.fusion import RunCodeRequest, RunStatus
from turnwise.sandbox.opening import Pool
from turnwise.sandbox.process import SandboxLost
from turnwise.sandbox.results import Status
from turnwise.sandbox.scripts import run_script
from turnwise.sandbox.session import Session
from turnwise.scoring.client_options import client_options
from turnwise.scoring.code_asserts import call_source, functions_in, holds
from turnwise.scoring.code_cases import CallCase, Case, ScriptCase, cases_of, literal, same_output, same_value
from turnwise.scoring.code_sandbox import limits_of, opened, sandbox_config
from turnwise.scoring.scorer import Score
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
        found = programs(_text(turn.message))
        if found:
            return found[-1]
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
    """One program under test."""

    pool: Pool
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
        """One test."""
        session = self.pool.session()
        try:
            if isinstance(case, ScriptCase):
                return await self._script(session, case)
            ready = await session.run(f"{self.code}\nNone", self.sandbox.seconds)
            if ready.status is not Status.OK:
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
        if result.status is not Status.OK:
            return False
        try:
            found = literal("None" if result.value is None else result.value)
        except ValueError:
            return False
        # Some data sets put the one result into a list.
        wrapped = isinstance(case.expected, list) and len(case.expected) == 1 and not isinstance(found, list | tuple)
        return same_value(found, case.expected[0] if wrapped else case.expected, self.tolerance)


async def _written(pool: Pool, trajectory: Trajectory, file: str, sandbox: SandboxConfig) -> str | None:
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
