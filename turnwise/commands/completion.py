"""`turnwise completion SHELL`: a script that lets bash, zsh or fish complete verbs, options, keys and values."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from turnwise.config.knobs import Knob, knobs_of
from turnwise.config.sections import full_config
from turnwise.extensions import named

HELP = "print a script that completes commands, options, config keys and values in bash, zsh or fish"
BASH = """\
_turnwise() {
    local line="${COMP_LINE:0:COMP_POINT}" current="" word prefix
    local -a words
    read -r -a words <<< "$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    current="${words[${#words[@]}-1]}"
    # bash itself splits words at the characters of COMP_WORDBREAKS; what stands before one must not be repeated
    prefix=""
    [[ "$COMP_WORDBREAKS" == *=* && "$current" == *=* ]] && prefix="${current%%=*}="
    COMPREPLY=()
    while IFS= read -r word; do
        COMPREPLY+=("${word#"$prefix"}")
        [[ "$word" == *[=./] ]] && compopt -o nospace
    done < <("$1" __complete "${words[@]:1}" 2>/dev/null)
}
complete -o bashdefault -o default -F _turnwise turnwise
"""
ZSH = """\
#compdef turnwise
_turnwise() {
    local -a found
    found=("${(@f)$("${words[1]}" __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    found=(${found:#})
    (( ${#found} )) || { _files; return }
    local -a open=(${(M)found:#*[=./]}) whole=(${found:#*[=./]})
    (( ${#open} )) && compadd -S '' -- $open
    (( ${#whole} )) && compadd -- $whole
}
if [ "$funcstack[1]" = "_turnwise" ]; then _turnwise "$@"; else compdef _turnwise turnwise; fi
"""
FISH = """\
function __turnwise_words
    set -l words (commandline -opc) (commandline -ct)
    set -l found (turnwise __complete $words[2..-1] 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c turnwise --no-files -a '(__turnwise_words)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
PACKAGE = Path(__file__).parent.parent
RUNS = Path("runs")
FOLDERS = {
    "chat.tool_format": ("chat/formats/*.py", ""),
    "profile": ("config/files/profiles/*.yaml", ""),
    "rollout.agent": ("rollout/loops/*.py", "loops"),
    "rollout.interaction": ("rollout/users/*.py", "users"),
    "rollout.tools": ("rollout/tools/*.py", "tools"),
}
"""Keys whose values are the files of a folder of ours, and what extensions bring of a kind."""
NOT_NAMES = ("__init__", "episode_user", "loading", "task_functions", "tool", "user")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=list(SCRIPTS), metavar="SHELL", help="bash, zsh or fish")
    parser.epilog = """\
switch it on:
  bash   echo 'eval "$(turnwise completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(turnwise completion zsh)"' >> ~/.zshrc      (after compinit)
  fish   turnwise completion fish > ~/.config/fish/completions/turnwise.fish
"""


def run(args: argparse.Namespace) -> int:
    """The script calls `turnwise __complete` with the words typed so far."""
    sys.stdout.write(SCRIPTS[args.shell])
    return 0


def candidates(words: Sequence[str], commands: Mapping[str, argparse.ArgumentParser]) -> list[str]:
    """Whole words that may stand where the last one is being typed.

    One that ends with `=`, `.` or `/` is not complete yet. Nothing means: the shell may offer files.
    """
    *before, current = words or [""]
    return sorted({word for word in _words(before, current, commands) if word.startswith(current)})


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
    positional = [word for word in before[1:] if not word.startswith("-") and "=" not in word]
    for action in (action for action in parser._actions if not action.option_strings):
        if action.choices and not positional:
            yield from map(str, action.choices)
        match action.dest:
            case "overrides":
                yield from _setting(current)
                if before == ["check"]:
                    yield from named("checks")
                if before == ["chat"]:
                    yield from _run_directories()
            case "key":
                yield from _keys(current, "")
            case "run_dir" | "policy" if not positional:
                yield from _run_directories()
            case "runs" | "places":
                yield from _run_directories()
            case "task" if not positional:
                from turnwise.data.task import preparable_tasks

                yield from preparable_tasks()


def _setting(current: str) -> Iterator[str]:
    """A key with `=`, or with it and one of its values."""
    key, equals, _ = current.partition("=")
    if not equals:
        yield from _keys(current, "=")
        return
    knobs = knobs_of(full_config())
    key_in_full = f"{key}.name" if f"{key}.name" in knobs else key  # engine=openai
    if key_in_full in knobs:
        yield from (f"{key}={value}" for value in _values(key_in_full, knobs[key_in_full]))


def _keys(current: str, end: str) -> Iterator[str]:
    """Keys of the section that is being typed; before its dot, sections and the keys outside of them."""
    for key in knobs_of(full_config()):
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
        from turnwise.data.task import builtin_tasks

        yield from builtin_tasks()
    if key == "run":
        yield from (path.name for path in _runs())
    if key in FOLDERS:
        files, kind = FOLDERS[key]
        yield from (path.stem for path in PACKAGE.glob(files) if path.stem not in NOT_NAMES)
        yield from named(kind) if kind else ()


def _run_directories() -> Iterator[str]:
    return (path.as_posix() for path in _runs())


def _runs() -> Iterator[Path]:
    if RUNS.is_dir():
        yield from (path for path in RUNS.iterdir() if (path / "config.yaml").is_file())
