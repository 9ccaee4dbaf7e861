"""The words that a shell script gives to verl, as bash makes them: the script is run in the sandbox, verl is not."""

import base64
import io
import os
import re
import shlex
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.errors import ConfigError
from turnwise.ext.sandbox.inside.isolate import SCRATCH
from turnwise.ext.sandbox.limits import MIB, Limits
from turnwise.ext.sandbox.pool import PoolSettings
from turnwise.ext.sandbox.shell.pool import ShellPool
from turnwise.ext.sandbox.shell.session import Ran, ShellSession
from turnwise.ext.sandbox.zygote_process import SandboxUnavailable
from turnwise.system.stopping import run_stoppable

SECONDS = 20.0
"""Of one run: a script that waits for a cluster would not end by itself."""
ROUNDS = 8
"""A script may read files beside it, and those files others."""
LARGEST = 256 * 1024
"""Bytes of a file that is read; no script is larger."""
MOST_NOTES = 1000
"""Programs of one run: a loop without an end would start any number."""
ROOT = f"{SCRATCH}/host"
"""Stands for / of this machine."""
_NOTES = f"{SCRATCH}/notes"
_PLACE = f"{SCRATCH}/preamble.sh"
_PROGRAMS = ("python", "python3", "torchrun", "accelerate", "deepspeed", "uv", "ray")
"""What is found on PATH too, for programs that start programs (xargs) and for `command python3`."""
_PREAMBLE = Path(__file__).with_name("script_preamble.sh")
_NAMES = re.compile(r"\$\{?[#!]?([A-Za-z_]\w*)")
_SECRET = re.compile(r"(?i)key|token|secret|passw|credential")
_COMPLAINT = re.compile(r": (line \d+: .*)")


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """A program that the script would have run: `ProgramCall(41, ("python3", "-m", "verl.trainer.main_ppo"))`."""

    line: int
    words: tuple[str, ...]
    is_asked: bool = False
    """It ran in a subshell: the script may have read what it printed."""


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """What a script did when it was run: its calls, and what it lacked."""

    calls: tuple[ProgramCall, ...]
    missing: tuple[str, ...]
    """Files that it would have read and that are not there."""
    unset: tuple[str, ...]
    """Variables that are set nowhere and were taken as empty: where it counts with them."""
    inherited: tuple[str, ...]
    """Variables of this process that it read."""
    complaints: tuple[str, ...]
    """What bash itself said was wrong: `line 12: /dev/fd/63: No such file or directory`."""
    ending: str
    """How it ended, if not well: `ended with exit code 1 (line 12: cd: no such file)`."""


def script_pool() -> ShellPool:
    """Where scripts are run; SandboxUnavailable when it is entered and no program can be confined here."""
    return ShellPool(PoolSettings(limits=Limits(seconds=SECONDS, output=4 * MIB), warm=1))


async def run_script(
    pool: ShellPool, script: Path, arguments: Sequence[str], environment: Mapping[str, str]
) -> ScriptRun:
    """Run it as if from this folder. Files beside it are given to it as it asks for them."""
    path = Path(os.path.abspath(script))
    files, requested = {str(path): _content(path)}, dict[str, None]()
    for _ in range(ROUNDS):
        read = set(_NAMES.findall("\n".join(content.decode(errors="replace") for content in files.values())))
        inherited = {name: environment[name] for name in sorted(read & set(environment)) if _may_go_in(name)}
        async with pool.shell() as session:
            ran = await _one_run(session, path, arguments, files, inherited)
            notes = await _noted_words(session)
        requested = dict.fromkeys(os.path.normpath(note[3]) for note in notes if note[0] == "file")
        nearby = {name: _content(Path(name)) for name in requested if name not in files and _is_near(Path(name), path)}
        if not nearby:
            break
        files |= nearby
    calls = [ProgramCall(int(line), tuple(words), depth != "0") for kind, line, depth, *words in notes if kind == "run"]
    unset = dict.fromkeys(note[3] for note in notes if note[0] == "unset")
    missing = [name for name in requested if name not in files]
    ending = _ending(ran) if len(notes) < MOST_NOTES else f"is read up to its first {MOST_NOTES} commands"
    return ScriptRun(tuple(calls), tuple(missing), tuple(unset), tuple(inherited), _complaints(ran), ending)


async def _one_run(
    session: ShellSession,
    path: Path,
    arguments: Sequence[str],
    files: Mapping[str, bytes],
    inherited: Mapping[str, str],
) -> Ran:
    here, home = ROOT + os.getcwd(), f"{ROOT}{Path.home()}"
    contents = {**{f"{ROOT}{name}": content for name, content in files.items()}, _PLACE: _PREAMBLE.read_bytes()}
    for name in _PROGRAMS:
        does = "tw_python" if name.startswith("python") else "tw_launch"
        contents[f"{SCRATCH}/bin/{name}"] = f'#!/bin/bash\n{does} {name} "$@"\n'.encode()
    unpacked = await session.run(argv=["tar", "-x"], stdin=_packed(contents))
    created = await session.run(argv=["mkdir", "-p", here, home, _NOTES])
    if not unpacked.fine or not created.fine:
        raise ConfigError(f"{path}: it could not be put into the sandbox: {(unpacked.output + created.output)[-200:]}")
    settings = {
        **inherited, "HOME": home, "PATH": f"{SCRATCH}/bin:/usr/bin:/bin", "BASH_ENV": _PLACE, "TW_ROOT": ROOT,
        "TW_SCRATCH": SCRATCH, "TW_NOTES": _NOTES, "TW_PYTHON": sys.executable, "TW_TOP": ROOT + _checkout(Path.cwd()),
    }  # fmt: skip
    words = [f"{name}={value}" for name, value in settings.items()]
    return await session.run(argv=["env", "-i", *words, "bash", f"{ROOT}{path}", *arguments], folder=here)


def _packed(contents: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in contents.items():
            entry = tarfile.TarInfo(os.path.relpath(name, SCRATCH))
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


async def _noted_words(session: ShellSession) -> list[list[str]]:
    """What was noted, in its order, with the paths of this machine."""
    each = 'while read -r note; do base64 -w0 -- "$note"; echo; done'
    ran = await session.run(f"cd {_NOTES} && ls | head -n {MOST_NOTES} | {each}")
    texts = [base64.b64decode(line).decode(errors="replace") for line in ran.output.split()]
    return [text.replace(ROOT, "").split("\0")[:-1] for text in texts]


def _content(path: Path) -> bytes:
    content = path.read_bytes()
    if len(content) > LARGEST:
        raise ConfigError(f"{path}: {len(content)} bytes, and a script of at most {LARGEST} is read")
    return content


def _is_near(path: Path, script: Path) -> bool:
    """A script chooses among the files of its own checkout or folder, not among all of this machine."""
    tops = (script.parent, Path(_checkout(script.parent)), Path.cwd())
    real = path.resolve()
    return real.is_file() and any(real.is_relative_to(top.resolve()) for top in tops if top != Path("/"))


def _checkout(folder: Path) -> str:
    """The git checkout that a folder is in; itself where there is none."""
    return str(next((top for top in (folder, *folder.parents) if (top / ".git").exists()), folder))


def _may_go_in(name: str) -> bool:
    return _SECRET.search(name) is None and name not in ("PATH", "HOME", "PWD", "BASH_ENV", "SHELLOPTS", "BASHOPTS")


def _ending(ran: Ran) -> str:
    """How it ended, where that is not well; bash's own words tell more than the last line of the script's."""
    if ran.fine:
        return ""
    if ran.stopped is not None:
        return f"was {ran.stopped}"
    complaints = _complaints(ran)
    broken = [complaint for complaint in complaints if "syntax error" in complaint]
    last = (broken[:1] or complaints[-1:] or ran.output.strip().split("\n")[-1:])[0].strip()
    return f"ended with exit code {ran.exit}" + (f" ({last[:200]})" if last else "")


def _complaints(ran: Ran) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.replace(ROOT, "") for text in _COMPLAINT.findall(ran.output)))


_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
_DELETED = re.compile(r"~([A-Za-z_][\w./@-]*)(?:=.*)?", re.DOTALL)
_COMPOSED_BY = {
    "--config-name": "defaults",
    "-cn": "defaults",
    "--config-path": "hydra.searchpath",
    "-cp": "hydra.searchpath",
}
"""Hydra's own flags, and the key under which a YAML file says the same."""
_POLICY = "actor_rollout_ref."
MOST_NAMED = 6


@dataclass(frozen=True, slots=True)
class ScriptWords:
    """Keys with their texts as the command has them, and what a person should know of how they were read."""

    overrides: list[tuple[str, str]]
    notes: list[str]


@dataclass(frozen=True, slots=True)
class _Launch:
    """A program of verl's with its words: `_Launch(41, "verl.trainer.main_ppo", ("a.b=1",))`."""

    line: int
    program: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.program}, started in line {self.line}" if self.line else self.program


def is_script(path: Path) -> bool:
    """By its name or its first line."""
    with path.open("rb") as file:
        return path.suffix in (".sh", ".bash", ".slurm", ".sbatch") or file.read(2) == b"#!"


def read_script(path: Path, arguments: Sequence[str] = ()) -> ScriptWords:
    """What the script gives to verl; where it runs verl more than once, the last run that trains a policy is read."""

    async def read() -> ScriptRun:
        async with script_pool() as pool:
            return await run_script(pool, path, arguments, os.environ)

    try:
        return words_of(path, run_stoppable(read()))
    except SandboxUnavailable as error:
        raise ConfigError(
            f"{path}: bash reads scripts in the sandbox, which is missing here. {error}\nWhere verl is installed, "
            "add `--cfg job --resolve` to the command that runs it, and give the YAML that it prints to --from-verl"
        ) from error


def words_of(path: Path, run: ScriptRun) -> ScriptWords:
    """What was given to verl in a run of the script; the path is for a message."""
    launches = [launch for call in run.calls if (launch := _launch_of(call)) is not None]
    if not launches:
        raise ConfigError(f"{path}: {_why_none(run)}")
    training = [launch for launch in launches if any(_POLICY in word for word in launch.words)]
    chosen = (training or launches)[-1]
    overrides, unread = _read_words(chosen.words)
    return ScriptWords(overrides, list(_notes(run, launches, chosen, unread)))


def _launch_of(call: ProgramCall) -> _Launch | None:
    """The Python program among a command's words that is given keys with dots, whatever starts it."""
    words = call.words
    for index, word in enumerate(words):
        if word == "-m" and index + 1 < len(words):
            program, rest = words[index + 1], words[index + 2 :]
        elif word.endswith(".py") and "=" not in word:
            program, rest = word, words[index + 1 :]
        else:
            continue
        is_given_keys = any((match := _OVERRIDE.fullmatch(each)) is not None and "." in match[1] for each in rest)
        return _Launch(call.line, program, rest) if is_given_keys else None
    return None


def _read_words(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """(keys and texts, the words that are neither)."""
    overrides: list[tuple[str, str]] = []
    unread: list[str] = []
    rest = iter(words)
    for word in rest:
        flag, _, value = word.partition("=")
        if flag in _COMPOSED_BY:
            overrides.append((_COMPOSED_BY[flag], value or next(rest, "")))
        elif (match := _OVERRIDE.fullmatch(word)) is not None:
            overrides.append((match[1], match[2]))
        elif (deleted := _DELETED.fullmatch(word)) is not None:
            overrides.append((deleted[1], "null"))
        else:
            unread.append(word)
    return overrides, unread


def _notes(run: ScriptRun, launches: Sequence[_Launch], chosen: _Launch, unread: Sequence[str]) -> Iterator[str]:
    yield f"read: {chosen}, as bash in the sandbox would start it"
    if len(launches) > 1:
        lines = "; ".join(map(str, launches[-MOST_NAMED:]))
        yield f"{len(launches)} programs get config keys; only the last that trains a policy is read: {lines}"
    if run.inherited:
        yield f"from your environment: {', '.join(run.inherited)}"
    if unread:
        yield f"words that are not keys: {shlex.join(unread[:MOST_NAMED])}"
    yield from _gaps(run)


def _gaps(run: ScriptRun) -> Iterator[str]:
    """What another machine might have answered otherwise."""
    if run.unset:
        yield f"not set, and taken as empty: {', '.join(run.unset)}"
    if run.missing:
        yield f"files that it reads and that are not here: {', '.join(run.missing)}"
    commands = dict.fromkeys(
        f"{call.words[0]} (line {call.line})" for call in run.calls if call.is_asked and _launch_of(call) is None
    )
    if commands:
        yield f"not run, so that they answered nothing: {', '.join(list(commands)[:MOST_NAMED])}"
    if run.complaints and not run.ending:
        yield f"bash said: {'; '.join(run.complaints[:MOST_NAMED])[:400]}"
    if run.ending:
        yield f"the script {run.ending}"


def _why_none(run: ScriptRun) -> str:
    """Why no run of verl was found in a script."""
    return "; ".join(["no program of verl's is started with keys", *_gaps(run)])
