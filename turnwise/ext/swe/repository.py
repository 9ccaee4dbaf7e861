"""A repository to mend: its files in a shell session, what a policy may do to them, and the tests that judge it."""

import asyncio
import json
import re
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from turnwise.errors import DataError
from turnwise.ext.sandbox.inside.isolate import SCRATCH
from turnwise.ext.sandbox.shell.pool import ShellPool
from turnwise.ext.sandbox.shell.session import Ran, ShellSession
from turnwise.ext.sandbox.zygote_process import SandboxLost

ROOT = f"{SCRATCH}/repo"
MOST_FILES = 4000
MOST_TESTS = 4000
_INSIDE = Path(__file__).parent / "inside"
_FILES_SCRIPT = (_INSIDE / "workspace.py").read_text()
_TOGETHER_SCRIPT = (_INSIDE / "tests_one_process.py").read_text()
_PACKAGE = "turnwise.ext.swe.inside"
_APART = (
    "proxies", "copied_values", "marshalling", "suppressed_errors", "rpc", "comparison_checks", "code_process",
    "held_files", "outcomes", "tests_two_processes",
)  # fmt: skip
_SOURCES = [
    *([name, ""] for name in ("turnwise", "turnwise.ext", "turnwise.ext.swe", _PACKAGE)),
    *([f"{_PACKAGE}.{name}", (_INSIDE / f"{name}.py").read_text()] for name in _APART),
]
_STUB = """import json, sys, types
sources = json.loads(sys.stdin.buffer.readline())
for name, text in sources:
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(compile(text, name, "exec"), vars(module))"""
"""Makes the driver's modules of their texts: the project itself is not in the sandbox."""
_APART_SCRIPT = f"{_STUB}\nsys.modules['{_PACKAGE}.tests_two_processes'].main(sources, {_STUB!r})"
OWN_SECONDS = 30.0
"""What our own commands in a session may take: a busy machine starts the first one slowly."""
_ANSWER_CHARS = 4_000_000
"""Of what our own script prints, changed files included."""
CONTROLS = frozenset({
    "conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg",
    "pyproject.toml",
})  # fmt: skip
"""Files that decide how tests are run: the repository's own stand, whatever became of them."""
_IMPORT, _WORD = re.compile(r"\s*(import|from)\b"), re.compile(r"\w+")
_RUNNERS = frozenset({"pytest", "_pytest", "pluggy", "iniconfig"})


def _relative(name: str) -> str:
    parts = name.split("/")
    if not name or "\0" in name or len(name) > 500 or any(part in ("", ".", "..", ".git") for part in parts):
        raise ValueError(f"{name[:80]!r} is not a path of a file in a repository")
    return name


FileName = Annotated[str, AfterValidator(_relative)]


class _Checked(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Commit(_Checked):
    """One step of a repository's history: which of its files come in with it."""

    message: Annotated[str, Field(max_length=2000)]
    files: list[FileName]


class Instance(_Checked):
    """What a row says of its repository. Without files, only a server knows it, by its id."""

    instance_id: Annotated[str, Field(min_length=1, max_length=200)]
    files: Annotated[dict[FileName, str], Field(max_length=MOST_FILES)] = {}
    history: Annotated[list[Commit], Field(max_length=50)] = []


class SweTests(_Checked):
    """What a row's ground truth says, in SWE-bench's words; `files` are put in place before the tests are run."""

    FAIL_TO_PASS: Annotated[list[str], Field(min_length=1, max_length=MOST_TESTS)]
    PASS_TO_PASS: Annotated[list[str], Field(max_length=MOST_TESTS)] = []
    files: Annotated[dict[FileName, str], Field(max_length=MOST_FILES)] = {}
    runner: Literal["unittest", "pytest"] = "unittest"
    apart: bool = True
    """Whether the code under test runs in another process than its tests; in the same one it can forge results."""


def read_instance(value: Any, where: str) -> Instance:
    """A row's repository; DataError with its place when it is none."""
    return _read(Instance, value, where)


def read_tests(value: Any, where: str) -> SweTests:
    """A row's tests; DataError with their place when they are none."""
    return _read(SweTests, value, where)


Kind = TypeVar("Kind", bound=_Checked)


def _read(kind: type[Kind], value: Any, where: str) -> Kind:
    """An object, or its JSON: in parquet, names of files would become columns."""
    try:
        return kind.model_validate_json(value) if isinstance(value, str) else kind.model_validate(value)
    except ValidationError as error:
        fault = error.errors(include_input=False, include_url=False)[0]
        raise DataError(f"{where}: {'.'.join(map(str, fault['loc']))[:80]}: {fault['msg'][:200]}") from error


@dataclass(frozen=True, slots=True)
class ActionResult:
    """What an action gave: `ActionResult("3 passed")`. `facts` are recorded; the policy reads the text."""

    text: str
    failed: bool = False
    done: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SuiteOutcome:
    """How the tests went, in numbers of tests: `SuiteOutcome(1, 1, 4, 4)`."""

    f2p_count: int
    f2p_total: int
    p2p_count: int
    p2p_total: int

    @property
    def resolved(self) -> bool:
        return (self.f2p_count, self.p2p_count) == (self.f2p_total, self.p2p_total)


class LocalWorkspace:
    """A repository in a shell session of this machine. The session is opened by the first action."""

    def __init__(self, pool: ShellPool, instance: Instance) -> None:
        if not instance.files:
            raise DataError(
                f"{instance.instance_id}: the row holds no files, so only a server knows the repository: set swe.url"
            )
        self.instance = instance
        self._session: ShellSession = pool.shell()
        self._open = False
        self._turn = asyncio.Lock()
        self._known = {name: sha256(text.encode()).hexdigest() for name, text in instance.files.items()}
        self._recorded: dict[str, Any] = {"changes": {}}

    async def act(self, name: str, arguments: Mapping[str, Any]) -> ActionResult:
        """bash, edit or finish, one at a time; SandboxLost when the machinery failed."""
        async with self._turn:
            if not self._open:
                await place(self._session, self.instance.files)
                await self._make_history()
                self._open = True
            match name:
                case "bash":
                    return await self._bash(str(arguments["command"]))
                case "edit":
                    return await self._edit(arguments)
                case "finish":
                    return ActionResult("Finished.", done=True, facts=await self._changes())
            raise ValueError(f"no action {name!r}")

    async def close(self) -> None:
        await self._session.close()

    async def _bash(self, command: str) -> ActionResult:
        ran = await self._session.run(command, folder=ROOT)
        facts = {"exit": ran.exit, **await self._changes()}
        return ActionResult(words(ran), facts=facts)

    async def _edit(self, arguments: Mapping[str, Any]) -> ActionResult:
        answer = await _script(self._session, {"do": "edit", "root": ROOT, **arguments})
        if "refused" in answer:
            return ActionResult(str(answer["refused"]), failed=True)
        return ActionResult(str(answer["text"]), facts={} if arguments["command"] == "view" else await self._changes())

    async def _changes(self) -> dict[str, Any]:
        """What differs from the repository as it was, when that has changed since the last action."""
        answer = await _script(self._session, {"do": "collect", "root": ROOT, "known": self._known})
        facts: dict[str, Any] = {key: answer[key] for key in ("changes", "too_much", "refused") if key in answer}
        if facts == self._recorded:
            return {}
        self._recorded = facts
        return facts

    async def _make_history(self) -> None:
        """With git, where it is installed; the repository is plain files where it is not."""
        steps = ["command -v git > /dev/null || exit 0", "git init -q -b main ."]
        for number, commit in enumerate(self.instance.history or [Commit(message="Start", files=[])]):
            names = " ".join(map(shlex.quote, commit.files)) if commit.files else "-A"
            date = f"2024-01-{number + 1:02}T12:00:00Z"
            steps.append(f"git add -- {names}" if commit.files else "git add -A")
            dates = f"GIT_AUTHOR_DATE={date} GIT_COMMITTER_DATE={date}"
            steps.append(f"{dates} git commit -q --allow-empty -m {shlex.quote(commit.message)}")
        ran = await self._session.run(" && ".join(f"{{ {step}; }}" for step in steps), folder=ROOT, seconds=60)
        if not ran.fine:
            raise SandboxLost(f"{self.instance.instance_id}: its history could not be made: {ran.output[-300:]}")


def words(ran: Ran) -> str:
    """What the policy reads of a command."""
    end = f"[{ran.stopped}]" if ran.stopped is not None else f"[exit code {ran.exit}]" if ran.exit else ""
    return "\n".join(part for part in (ran.output.rstrip("\n"), end) if part) or "(no output)"


async def run_tests(
    pool: ShellPool, instance: Instance, changes: Mapping[str, str | None], tests: SweTests, seconds: float = 60.0
) -> SuiteOutcome:
    """The tests in a session of their own, on the changed repository, with what decides about tests restored."""
    session = pool.shell()
    try:
        await place(session, instance.files)
        judged: dict[str, Any] = {
            "do": "place", "root": ROOT, "files": {**allowed(changes, instance, tests), **tests.files},
        }  # fmt: skip
        script, order, unseen = _order(instance, judged["files"], tests)
        judged["files"] = {**judged["files"], **dict.fromkeys(unseen, "")}
        if "refused" in await _script(session, judged):  # a file where the tests need a folder
            return SuiteOutcome(0, len(set(tests.FAIL_TO_PASS)), 0, len(set(tests.PASS_TO_PASS)))
        names = [*tests.FAIL_TO_PASS, *tests.PASS_TO_PASS]
        secret = secrets.token_hex(32)
        stdin = "\n".join([*map(json.dumps, order), secret, ""]).encode()
        argv = ("python", "-I", "-B", "-c", script)
        ran = await session.run(argv=argv, folder=ROOT, stdin=stdin, seconds=seconds, output=_ANSWER_CHARS)
    finally:
        await session.close()
    passed = _passed(ran, secret, names)
    counts = [
        sum(name in passed for name in dict.fromkeys(group)) for group in (tests.FAIL_TO_PASS, tests.PASS_TO_PASS)
    ]
    return SuiteOutcome(counts[0], len(set(tests.FAIL_TO_PASS)), counts[1], len(set(tests.PASS_TO_PASS)))


def _order(instance: Instance, changed: Mapping[str, str | None], tests: SweTests) -> tuple[str, list[Any], set[str]]:
    """The script that runs the tests, what it reads first, and the modules of tests that are nowhere on disk."""
    order: dict[str, Any] = {"runner": tests.runner, "tests": [*tests.FAIL_TO_PASS, *tests.PASS_TO_PASS]}
    if not tests.apart:
        return _TOGETHER_SCRIPT, [order], set()
    files = {name: text for name, text in {**instance.files, **changed}.items() if text is not None}
    named = _files_of(tests) | (set(tests.files) - set(instance.files))
    held = {name: text for name, text in files.items() if decides(name) or name in named}
    code = [name for name in files if name not in held]
    return _APART_SCRIPT, [_SOURCES, {**order, "scratch": SCRATCH, "held": held, "code": code}], _modules(held, tests)


def _modules(held: Mapping[str, str], tests: SweTests) -> set[str]:
    """Those of the tests' files that are modules: they say what is expected, which the code under test could read.

    A sample that no test imports is data, and stays where the code can be pointed at it.
    """
    named = _files_of(tests)
    lines = (line for text in held.values() for line in text.splitlines() if _IMPORT.match(line))
    imported = {word for line in lines for word in _WORD.findall(line)}
    python = {name: name.split("/")[-1].removesuffix(".py") for name in held if name.endswith(".py")}
    return {
        name for name, stem in python.items()
        if name in named or stem in imported or stem == "conftest" or stem.startswith("test_") or stem.endswith("_test")
    }  # fmt: skip


def allowed(changes: Mapping[str, str | None], instance: Instance, tests: SweTests) -> dict[str, str | None]:
    """A policy's changes without what would decide about tests rather than mend the code."""
    named = _files_of(tests)
    roots = {name.split("/")[0].removesuffix(".py") for name in instance.files}
    harmless = {}
    for name, text in changes.items():
        top = name.split("/")[0].removesuffix(".py")
        shadows = top not in roots and (top in sys.stdlib_module_names or top in _RUNNERS)
        if not (shadows or decides(name) or name in named):
            harmless[name] = text
    return harmless


def _files_of(tests: SweTests) -> set[str]:
    """The files that tests are named after, whatever they are called: a/b.py of a.b.Case.test_it or a/b.py::test_it."""
    names = {*tests.FAIL_TO_PASS, *tests.PASS_TO_PASS}
    if tests.runner == "pytest":
        return {name.partition("::")[0] for name in names}
    parts = [name.split(".")[:-1] for name in names]
    return {"/".join(segments[:length]) + ".py" for segments in parts for length in range(1, len(segments) + 1)}


def decides(name: str) -> bool:
    """Whether a file is a test or says how tests are run; the policy's version of it is not judged by itself."""
    *folders, last = name.split("/")
    is_test = last.startswith("test_") or last.endswith("_test.py") or bool({"test", "tests"} & set(folders))
    return is_test or last in CONTROLS or last.endswith(".pth")


def _passed(ran: Ran, secret: str, names: Sequence[str]) -> set[str]:
    """Tests that passed: from the one line that begins with the secret, of a run that came to its end."""
    lines = [line for line in ran.output.splitlines() if line.startswith(secret)]
    if not ran.fine or len(lines) != 1 or len(outcomes := lines[0].removeprefix(secret)) != len(names):
        return set()
    return {name for name, outcome in zip(names, outcomes, strict=True) if outcome == "p"}


async def place(session: ShellSession, files: Mapping[str, str | None]) -> None:
    """Put files into the session's repository."""
    created = await session.run("mkdir -p repo", seconds=OWN_SECONDS)
    answer = await _script(session, {"do": "place", "root": ROOT, "files": dict(files)})
    if not created.fine or "refused" in answer:
        raise SandboxLost(f"the repository could not be put in place: {answer.get('refused', words(created))}")


async def _script(session: ShellSession, order: dict[str, Any]) -> dict[str, Any]:
    """Our own script about files, inside; what it says is the session's word."""
    argv = ("python", "-I", "-S", "-B", "-c", _FILES_SCRIPT)
    ran = await session.run(argv=argv, stdin=json.dumps(order).encode(), seconds=OWN_SECONDS, output=_ANSWER_CHARS)
    try:
        answer = json.loads(ran.output) if ran.fine else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise SandboxLost(f"the repository's files could not be reached: {words(ran)[-300:]}")
    return answer
