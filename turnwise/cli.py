"""The command line: parse first, import after, so that `--help` and config errors come at once."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from turnwise.errors import ConfigError, TurnwiseError, unknown
from turnwise.stopping import Stopped, run_stoppable, stoppable

if TYPE_CHECKING:
    from turnwise.compose import Composed
    from turnwise.preflight import Report

EPILOG = """\
examples:
  turnwise eval                                    the embedded model on the embedded task
  turnwise eval sampling.temperature=0 --json      greedy; the last line is one JSON object
  turnwise train run=first                         reinforcement learning with checkpoints
  turnwise train run=first resume=auto             go on with it
  turnwise sft sft.recorded=[runs/first] sft.min_reward=1      learn from a run's good trajectories
  turnwise check data.eval_files=test.parquet      try everything that can go wrong, load no model
  turnwise check sandbox                           attack the sandbox and show what holds
  turnwise prepare gsm8k --source DIR              GSM8K as train.parquet and test.parquet under data/gsm8k
  turnwise show runs/NAME --sample 3               one transcript, coloured by who wrote what
  turnwise board                                   every run under runs/ in the browser, live
  turnwise report runs/NAME --out report.html      one run as a file to share

Every command takes key=value overrides and --config FILE; `turnwise check` lists all keys with their values.
"""


class _Parser(argparse.ArgumentParser):
    """Its mistakes are told like all others: on one line, with the nearest valid name."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message} (`{self.prog} --help` says more)")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            text = unknown(str(action.metavar or action.dest).lower(), str(value), map(str, action.choices))
            raise argparse.ArgumentError(None, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 for a failed check, 2 for a mistake in what was asked, 128 + a signal."""
    try:
        with stoppable():
            parser, commands = _parser()
            args, rest = parser.parse_known_args(argv)
            if args.command is None and rest:
                options = [name for action in parser._actions for name in action.option_strings]
                sys.stderr.write(f"turnwise: {unknown('argument', rest[0], options)}\n")
                return 2
            if args.command is None:
                parser.print_help()
                return 0
            return _run(args, rest, commands)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except Stopped as stop:  # before there was a command
        sys.stderr.write(f"turnwise: {stop}\n")
        return stop.exit_code


def _run(args: argparse.Namespace, rest: list[str], commands: dict[str, argparse.ArgumentParser]) -> int:
    try:
        for extra in rest:
            if extra.startswith("-") or not hasattr(args, "overrides"):
                options = [name for action in commands[args.command]._actions for name in action.option_strings]
                raise ConfigError(unknown(f"argument of `turnwise {args.command}`", extra, options))
            args.overrides.append(extra)
        code: int = args.run(args)
        return code
    except TurnwiseError as error:
        text = " ".join(line.strip() for line in str(error).splitlines())
        sys.stderr.write(f"turnwise {args.command}: {text}\n")
        return 2
    except Stopped as stop:
        sys.stderr.write(f"turnwise {args.command}: {stop}\n")
        return stop.exit_code
    except KeyboardInterrupt:  # raised by a stranger's code
        sys.stderr.write(f"turnwise {args.command}: stopped\n")
        return 130
    except BrokenPipeError:  # the reader of our output has gone, e.g. `| head`
        sys.stderr.close()
        return 141


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = _Parser(
        prog="turnwise",
        description="Multi-turn, tool-calling reinforcement learning of language-model agents.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"turnwise {_version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands: dict[str, argparse.ArgumentParser] = {}

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str, *, config: bool = True) -> None:
        made = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        made.set_defaults(run=run)
        commands[name] = made
        if config:
            made.add_argument("overrides", nargs="*", metavar="key=value", help="config values, such as seed=1")
            made.add_argument("--config", type=Path, metavar="FILE", help="a YAML file of config values")

    command("eval", _eval, "roll out and score the evaluation samples")
    commands["eval"].add_argument("--json", action="store_true", help="print one JSON object as the last line")
    commands["eval"].add_argument("--no-transcript", action="store_true", help="leave out the example transcript")
    command("train", _train, "train with reinforcement learning, then evaluate")
    commands["train"].add_argument("--json", action="store_true", help="print one JSON object as the last line")
    commands["train"].add_argument(
        "--trust-run", action="store_true", help="resume=auto: import and reach what only the run's own config names"
    )
    command("check", _check, "try everything that can go wrong, load no model; `check sandbox` attacks the sandbox")
    commands["check"].add_argument("--json", action="store_true", help="print one JSON object as the last line")
    command("sft", _sft, "fine-tune a model on scripted or recorded trajectories")
    commands["sft"].add_argument("--json", action="store_true", help="print one JSON object as the last line")
    command("show", _show, "print a recorded trajectory, coloured by origin", config=False)
    show = commands["show"]
    show.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory, such as runs/eval-20260101-120000")
    show.add_argument("--sample", type=int, default=0, metavar="K", help="which trajectory (default 0)")
    command("prepare", _prepare, "make train and test parquet files of a data set", config=False)
    prepare = commands["prepare"]
    prepare.add_argument("dataset", metavar="DATASET", help="gsm8k or arithmetic")
    prepare.add_argument("--source", default=None, help="a folder with train.jsonl and test.jsonl, or a hub id")
    prepare.add_argument("--out", type=Path, default=None, help="output folder (default data/DATASET)")
    prepare.add_argument("--flavour", default=None, help="gsm8k: plain, tool, interaction or tool+interaction")
    prepare.add_argument(
        "--interaction", default=None, metavar="NAME", help="gsm8k: the simulated user, e.g. code_verify"
    )
    for name in ("board", "report", "rescore", "filter", "judge", "sandbox", "import-jsonl"):
        verb = import_module(f"turnwise.commands.{name.replace('-', '_')}")
        command(name, verb.run, verb.HELP, config=False)
        verb.add_arguments(commands[name])
    return parser, commands


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("turnwise")
    except PackageNotFoundError:  # run from a checkout
        return "(not installed)"


def _compose(args: argparse.Namespace) -> "Composed":
    from turnwise.compose import compose

    return compose(args.overrides, args.config)


def _refuse_unread(composed: "Composed") -> None:
    from turnwise.compose import unread

    problems = unread(composed)
    if problems:
        raise ConfigError("; ".join(problems))


def _eval(args: argparse.Namespace) -> int:
    composed = _compose(args)
    _refuse_unread(composed)
    from rich.console import Console

    from turnwise.eval import evaluate
    from turnwise.storage.transcript import transcript

    out = Console()
    report = evaluate(composed.config)
    if report.trajectories and not args.no_transcript:
        out.print(transcript(report.trajectories[0], None))
    out.print(report.table())
    out.print(f"run directory: {report.run}", soft_wrap=True, highlight=False, markup=False)
    if args.json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    return 0


def _train(args: argparse.Namespace) -> int:
    from turnwise.trainer.resuming import compose_training, resume_command

    composed = compose_training(args.overrides, args.config, trusted=args.trust_run)
    _refuse_unread(composed)
    from rich.console import Console

    from turnwise.train import train

    report = train(composed.config)
    out = Console()
    out.print(report.table())
    out.print(f"run directory: {report.run}", soft_wrap=True, highlight=False, markup=False)
    if not report.after:
        command = resume_command(report.run.name, composed.config)
        out.print(f"go on with: {command}", soft_wrap=True, highlight=False, markup=False)
    if args.json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    return 0


def _check(args: argparse.Namespace) -> int:
    if args.overrides[:1] == ["sandbox"]:
        del args.overrides[0]
        return _check_sandbox(args)
    composed = _compose(args)
    from turnwise.preflight import preflight

    report = preflight(composed)
    _print_check(composed, report)
    if args.json:
        findings = [{"check": f.check, "outcome": f.outcome.value, "text": f.text} for f in report.findings]
        sys.stdout.write(json.dumps({"passed": report.passed, "findings": findings}) + "\n")
    return 0 if report.passed else 1


def _check_sandbox(args: argparse.Namespace) -> int:
    """What the sandbox is worth here: every attack of the probe and how it went."""
    composed = _compose(args)
    from turnwise.rollout.tools.python import open_pool

    async def probe() -> tuple[str, str]:
        async with open_pool(composed.config.sandbox) as pool:
            if pool.report is None:
                raise ConfigError(f"{composed.config.sandbox.url} does not say what it proved")
            return pool.report.level.name, pool.report.text()

    level, text = run_stoppable(probe())
    sys.stdout.write(text + "\n")
    if args.json:
        sys.stdout.write(json.dumps({"level": level, "report": text.splitlines()}) + "\n")
    return 0


def _print_check(composed: "Composed", report: "Report") -> None:
    import enum

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = Console()
    table = Table(title="configuration", show_edge=False)
    for column in ("key", "value", "from"):
        table.add_column(column, overflow="fold")
    for key, value in composed.values().items():
        shown = value.value if isinstance(value, enum.Enum) else value
        table.add_row(key, Text(str(shown)), composed.origins[key])
    out.print(table)
    if report.plan:
        out.rule("plan")
        out.print(report.plan, markup=False, highlight=False)
    out.rule("checks")
    colours = {"ok": "green", "warning": "yellow", "error": "bold red"}
    for finding in report.findings:
        out.print(Text.assemble((f"{finding.outcome:8}", colours[finding.outcome]), f"{finding.check}: {finding.text}"))
    out.print("passed" if report.passed else "failed", style="green" if report.passed else "bold red")


def _sft(args: argparse.Namespace) -> int:
    composed = _compose(args)
    _refuse_unread(composed)
    from rich.console import Console

    from turnwise.sft import fine_tune

    report = fine_tune(composed.config)
    out = Console()
    out.print(report.table())
    out.print(f"policy: {report.policy}", soft_wrap=True, highlight=False, markup=False)
    if args.json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    return 0


def _show(args: argparse.Namespace) -> int:
    from rich.console import Console

    from turnwise.errors import StorageError
    from turnwise.storage.run_dir import RunDir
    from turnwise.storage.trajectories import read_trajectories
    from turnwise.storage.transcript import transcript

    run = RunDir.open(args.run_dir)
    files = sorted([*run.path.glob("eval/*.parquet"), *run.path.glob("trajectories/*.parquet")])
    if not files:
        raise StorageError(f"{run.path} holds no trajectories yet")
    trajectories = read_trajectories(files[-1])
    if not 0 <= args.sample < len(trajectories):
        raise ConfigError(f"--sample {args.sample}: {files[-1].name} holds trajectories 0 to {len(trajectories) - 1}")
    Console().print(transcript(trajectories[args.sample], None))
    return 0


def _prepare(args: argparse.Namespace) -> int:
    if args.dataset not in ("gsm8k", "arithmetic"):
        raise ConfigError(unknown("data set", args.dataset, ("gsm8k", "arithmetic")))
    out = args.out or Path("data") / args.dataset
    if args.dataset == "arithmetic":
        from turnwise.tasks.arithmetic import prepare as prepare_arithmetic

        written = prepare_arithmetic(out)
    else:
        from turnwise.tasks.gsm8k import Flavour
        from turnwise.tasks.gsm8k import prepare as prepare_gsm8k

        default = "interaction" if args.interaction else "plain"
        name = args.flavour or default
        if name not in [flavour.value for flavour in Flavour]:
            raise ConfigError(unknown("flavour", name, [flavour.value for flavour in Flavour]))
        source = args.source or "openai/gsm8k"
        report = prepare_gsm8k(source, out, flavour=Flavour(name), interaction=args.interaction)
        written = {report.files[split]: report.rows[split] for split in report.files}
    for path, count in written.items():
        sys.stdout.write(f"wrote {path} ({count} rows)\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
