"""The command line: finds the verb and runs it; parse first, import after, so that help and mistakes come at once."""

import argparse
import io
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from turnwise.errors import ConfigError, PluginError, TurnwiseError
from turnwise.errors.nearest_name import unknown
from turnwise.extensions import named, others
from turnwise.system.plugins import load_module

VERBS = {
    "train and evaluate": ("eval", "train", "sft", "probe"),
    "before a run": ("new", "check", "config", "prepare", "data"),
    "after a run": ("chat", "show", "replay", "rescore", "filter"),
    "shell": ("completion",),
}
"""Each verb is a file in turnwise/commands with HELP, add_arguments(parser) and run(args); here it gets its place.
An extension's stands behind them, under the title that its GROUP names."""
COMPLETE = "__complete"
"""What the shell's completion calls; see turnwise/commands/completion.py."""
EXAMPLES = """\
examples:
  turnwise eval                                    the bundled model on the bundled task
  turnwise eval sampling.temperature=0 --json      greedy; the last line is one JSON object
  turnwise train run=first                         reinforcement learning with checkpoints
  turnwise train run=first resume=auto             resume it
  turnwise check data.eval_files=test.parquet      check everything before a run, load no model
  turnwise config training.max_lag                 what a key does and when to touch it
  turnwise show runs/NAME --sample 3               one transcript, coloured by who wrote what
  turnwise board                                   every run under runs/ in the browser, live

`turnwise COMMAND --help` says more of a command; config values are key=value, or in a file given with --config.
"""


class _Parser(argparse.ArgumentParser):
    """Its mistakes are reported like all others: on one line, with the nearest valid name."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message} (`{self.prog} --help` says more)")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            kind = str(action.metavar or action.dest).lower()
            text = unknown(kind, str(value), map(str, action.choices))
            if kind == "command" and "=" in str(value):
                text = f"{value!r} is not a command; config values come after one, as in `turnwise eval {value}`"
            raise argparse.ArgumentError(None, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 for a failed check, 2 for a mistake in what was asked, 128 + a signal."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale without our signs shows others, and no traceback
            stream.reconfigure(errors="replace")
    if words[:1] == [COMPLETE]:
        return _complete(words[1:])
    if words[:1] in (["help"], ["version"]):  # as many other programs say it
        words = [*words[1:], f"--{words[0]}"]
    from turnwise.system.stopping import Stopped, stoppable

    try:
        with stoppable():
            parser, commands = make_parser()
            args, rest = parser.parse_known_args(words)
            if args.command is None and rest:
                options = [name for action in parser._actions for name in action.option_strings]
                sys.stderr.write(f"turnwise: {unknown('argument', rest[0], options)}\n")
                return 2
            if args.command is None:
                parser.print_help()
                return 0
            return _run(args, rest, commands)
    except TurnwiseError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except Stopped as stop:  # before there was a command
        sys.stderr.write(f"turnwise: {stop}\n")
        return stop.exit_code


def _run(args: argparse.Namespace, rest: list[str], commands: dict[str, argparse.ArgumentParser]) -> int:
    from turnwise.system.stopping import Stopped

    try:
        for extra in rest:
            if extra.startswith("-") or not hasattr(args, "overrides"):
                raise ConfigError(_unknown_argument(extra, commands[args.command], hasattr(args, "overrides")))
            args.overrides.append(extra)
        code: int = args.verb_of_command.run(args)
        return code
    except TurnwiseError as error:
        text = " ".join(line.strip() for line in str(error).splitlines())
        sys.stderr.write(f"turnwise {args.command}: {text}\n")
        return 2
    except Stopped as stop:
        sys.stderr.write(f"turnwise {args.command}: {stop}\n")
        return stop.exit_code
    except KeyboardInterrupt:  # raised by a plug-in's code
        sys.stderr.write(f"turnwise {args.command}: stopped\n")
        return 130
    except BrokenPipeError:  # the reader of our output has gone, e.g. `| head`
        sys.stderr.close()
        return 141


def _unknown_argument(extra: str, parser: argparse.ArgumentParser, takes_keys: bool) -> str:
    """Who writes `--steps 3` means a config value, not the option that is spelt most like it."""
    word = extra.lstrip("-").partition("=")[0].replace("-", "_")
    if takes_keys:
        from turnwise.config.knobs import knobs_of
        from turnwise.config.sections import full_config

        keys = [key for key in knobs_of(full_config()) if word in (key, key.rsplit(".", 1)[-1])]
        of_sft = parser.prog.endswith(" sft")
        keys = [key for key in keys if key.startswith("sft.") == of_sft] or keys
        if keys:
            return f"{extra!r} is not an option: config values are written key=value, as in {' or '.join(keys)}=..."
    options = [name for action in parser._actions for name in action.option_strings]
    return unknown(f"argument of `{parser.prog}`", extra, options)


def make_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of everything, and that of each verb by name."""
    parser = _Parser(
        prog="turnwise",
        usage="turnwise COMMAND [key=value ...] [options]",
        description="Multi-turn, tool-calling reinforcement learning of language-model agents.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", help=argparse.SUPPRESS, prog="turnwise")
    commands: dict[str, argparse.ArgumentParser] = {}
    for title, verbs in _verbs().items():
        for name, verb in verbs.items():
            commands[name] = subparsers.add_parser(
                name,
                description=verb.HELP[0].upper() + verb.HELP[1:] + ".",
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            commands[name].set_defaults(verb_of_command=verb)  # not `run`: a verb may have an argument of that name
            verb.add_arguments(commands[name])
        parser.add_argument_group(title, "\n".join(f"{name:14}{verb.HELP}" for name, verb in verbs.items()))
    return parser, commands


def _verbs() -> dict[str, dict[str, Any]]:
    """The modules of all verbs by title and name: ours, then those of extensions."""
    groups: dict[str, dict[str, Any]] = {
        title: {name: import_module(f"turnwise.commands.{name}") for name in names} for title, names in VERBS.items()
    }
    for name, module in named("verbs", [name for names in VERBS.values() for name in names]).items():
        verb: Any = load_module(module, "verb")
        if lacking := [part for part in ("HELP", "add_arguments", "run") if not hasattr(verb, part)]:
            raise PluginError(f"verb {name!r}: the module {module} has no {', '.join(lacking)}")
        groups.setdefault(getattr(verb, "GROUP", "extensions"), {})[name] = verb
    return groups


def _complete(words: list[str]) -> int:
    """Words for the shell, one a line; a mistake in what was typed so far is not its business."""
    from turnwise.commands.completion import candidates

    sys.stdout.writelines(f"{word}\n" for word in candidates(words, make_parser()[1]))
    return 0


def _version() -> str:
    """Ours, and the packages that bring extensions."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version("turnwise")
    except PackageNotFoundError:  # run from a checkout
        own = "(not installed)"
    brought = [f"with {name} of {package}" for name, (_, package) in others().items()]
    return ", ".join([f"turnwise {own}", *brought])


if __name__ == "__main__":
    sys.exit(main())
