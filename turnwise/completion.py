"""What a shell may offer next: verbs, options, config keys, their values, run directories. No heavy imports."""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from turnwise.config import Config
from turnwise.knobs import Knob, knobs_of
from turnwise.task import builtin_tasks, preparable_tasks

FOLDER = Path(__file__).parent
RUNS = Path("runs")
NAMED = {
    "chat.tool_format": "chat/formats",
    "profile": "conf/profiles",
    "rollout.agent": "rollout/agent_loops",
    "rollout.interaction": "rollout/interactions",
    "rollout.tools": "rollout/tools",
}
"""Keys whose values are the files of a folder of ours."""
NOT_NAMES = ("__init__", "base", "tool")


def candidates(words: Sequence[str], commands: Mapping[str, argparse.ArgumentParser]) -> list[str]:
    """Whole words that may stand where the last one is being typed.

    One that ends with `=`, `.` or `/` is not complete yet. Nothing means: the shell may offer files.
    """
    *before, current = words or [""]
    found = _words(before, current, commands)
    return sorted({word for word in found if word.startswith(current)})


def _words(before: list[str], current: str, commands: Mapping[str, argparse.ArgumentParser]) -> Iterable[str]:
    if not before:
        return [*commands, "--help", "--version"]
    parser = commands.get(before[0])
    if parser is None:
        return []
    option = next((action for action in parser._actions if before[-1] in action.option_strings), None)
    if option is not None and option.nargs != 0:
        return option.choices or []
    if current.startswith("-"):
        return (name for action in parser._actions for name in action.option_strings)
    return _positional(before, current, parser)


def _positional(before: list[str], current: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    given = [word for word in before[1:] if not word.startswith("-") and "=" not in word]
    for action in (action for action in parser._actions if not action.option_strings):
        if action.choices and not given:
            yield from map(str, action.choices)
        match action.dest:
            case "overrides":
                yield from _setting(current)
                if before == ["check"]:
                    yield "sandbox"
            case "key":
                yield from _keys(current, "")
            case "run_dir" if not given:
                yield from _run_directories()
            case "runs" | "places":
                yield from _run_directories()
            case "task" if not given:
                yield from preparable_tasks()


def _setting(current: str) -> Iterator[str]:
    """A key with `=`, or with it and one of its values."""
    key, equals, _ = current.partition("=")
    if not equals:
        yield from _keys(current, "=")
        return
    knobs = knobs_of(Config)
    key_in_full = f"{key}.name" if f"{key}.name" in knobs else key  # engine=openai
    if key_in_full in knobs:
        yield from (f"{key}={value}" for value in _values(key_in_full, knobs[key_in_full]))


def _keys(current: str, end: str) -> Iterator[str]:
    """Keys of the section that is being typed; before its dot, sections and the keys outside of them."""
    for key in knobs_of(Config):
        section, dot, _ = key.partition(".")
        if dot and not current.startswith(f"{section}."):
            yield f"{section}."
        else:
            yield key + end


def _values(key: str, knob: Knob) -> Iterator[str]:
    yield from knob.choices
    if knob.hint is bool:
        yield from ("true", "false")
    if knob.takes_null:
        yield "null"
    if key == "task":
        yield from builtin_tasks()
    if key == "run":
        yield from (path.name for path in _runs())
    if key in NAMED:
        names = (path.stem for path in (FOLDER / NAMED[key]).glob("*.yaml" if key == "profile" else "*.py"))
        yield from (name for name in names if name not in NOT_NAMES)


def _run_directories() -> Iterator[str]:
    return (path.as_posix() for path in _runs())


def _runs() -> Iterator[Path]:
    if RUNS.is_dir():
        yield from (path for path in RUNS.iterdir() if (path / "config.yaml").is_file())
