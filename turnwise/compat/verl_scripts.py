"""The words that a shell script gives to verl, as bash makes them: the script is run in the sandbox, verl is not."""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.compat.script_runs import Call, ScriptRun, run_script, script_pool
from turnwise.errors import ConfigError
from turnwise.sandbox.process import SandboxUnavailable
from turnwise.stopping import run_stoppable

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
            f"{path}: bash reads scripts in the sandbox, which cannot be had here. {error}\nWhere verl is installed, "
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


def _launch_of(call: Call) -> _Launch | None:
    """The Python program among a command's words that is given keys with dots, whatever starts it."""
    words = call.words
    for place, word in enumerate(words):
        if word == "-m" and place + 1 < len(words):
            program, rest = words[place + 1], words[place + 2 :]
        elif word.endswith(".py") and "=" not in word:
            program, rest = word, words[place + 1 :]
        else:
            continue
        is_given_keys = any((found := _OVERRIDE.fullmatch(each)) is not None and "." in found[1] for each in rest)
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
        elif (found := _OVERRIDE.fullmatch(word)) is not None:
            overrides.append((found[1], found[2]))
        elif (deleted := _DELETED.fullmatch(word)) is not None:
            overrides.append((deleted[1], "null"))
        else:
            unread.append(word)
    return overrides, unread


def _notes(run: ScriptRun, launches: Sequence[_Launch], chosen: _Launch, unread: Sequence[str]) -> Iterator[str]:
    yield f"read: {chosen}, as bash in the sandbox would start it"
    if len(launches) > 1:
        lines = "; ".join(map(str, launches[-MOST_NAMED:]))
        yield f"{len(launches)} programs are started with keys, and one is read, the last that trains a policy: {lines}"
    if run.inherited:
        yield f"from your environment: {', '.join(run.inherited)}"
    if unread:
        yield f"words that are no keys: {shlex.join(unread[:MOST_NAMED])}"
    yield from _gaps(run)


def _gaps(run: ScriptRun) -> Iterator[str]:
    """What another machine might have answered otherwise."""
    if run.unset:
        yield f"not set, and taken as empty: {', '.join(run.unset)}"
    if run.missing:
        yield f"files that it reads and that are not here: {', '.join(run.missing)}"
    asked = dict.fromkeys(
        f"{call.words[0]} (line {call.line})" for call in run.calls if call.is_asked and _launch_of(call) is None
    )
    if asked:
        yield f"not run, so that they answered nothing: {', '.join(list(asked)[:MOST_NAMED])}"
    if run.complaints and not run.ending:
        yield f"bash said: {'; '.join(run.complaints[:MOST_NAMED])[:400]}"
    if run.ending:
        yield f"the script {run.ending}"


def _why_none(run: ScriptRun) -> str:
    """Why no run of verl was seen."""
    return "; ".join(["no program of verl's is started with keys", *_gaps(run)])
