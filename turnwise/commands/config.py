"""`turnwise config [KEY]`: what a knob does, its default, what it takes, when to touch it and who reads it."""

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnwise.config.docs import KnobPage

HELP = "explain the config: all keys, those of a section, or one key in full"
FULL_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "key",
        nargs="?",
        metavar="KEY",
        help="a key such as training.max_lag, a section such as training, or a key of another system",
    )
    parser.add_argument("--json", action="store_true", help="print the pages as one JSON object by key")
    parser.epilog = "Keys are set as key=value on the command line, or in a YAML file given with --config."


def run(args: argparse.Namespace) -> int:
    """Everything is read from the config's own source."""
    from turnwise.config.docs import equivalent, find, pages, read_by
    from turnwise.config.knob_usage import readers
    from turnwise.data.task import builtin_tasks, config_values

    key = args.key.partition("=")[0] if args.key else None  # training.max_lag=1 asks for the key as well
    if key is not None and (here := equivalent(key)) is not None:
        answer = {key: {"equivalent": here}}
        sys.stdout.write(
            json.dumps(answer) + "\n" if args.json else f"{key} is not a Turnwise key; its equivalent: {here}\n"
        )
        return 0
    every = pages({task: config_values(task) for task in builtin_tasks()})
    chosen = list(every.values()) if key is None else find(key, every)
    if args.json:
        who = readers(chosen[0].key if len(chosen) == 1 else None)
        entries = {page.key: page.as_json(who.get(page.key, [])) for page in chosen}
        sys.stdout.write(json.dumps(entries) + "\n")
        return 0
    lines = _list(chosen) if len(chosen) > 1 else _page(chosen[0], read_by(chosen[0].key))
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _list(chosen: "list[KnobPage]") -> Iterator[str]:
    """One line a key; cut at the edge of a terminal, whole in a pipe."""
    from turnwise.config.docs import section_docs, shown

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    titles, section = section_docs(), None
    column = max(len(page.key) for page in chosen)
    for page in chosen:
        if (here := page.key.rpartition(".")[0]) != section:
            if section is not None:
                yield ""
            section = here
            yield f"{section or 'run'}: {titles[section]}"
        default = shown(page.knob.default)
        line = f"  {page.key:{column}}  {default if len(default) <= 14 else default[:11] + '...':14}  {page.summary}"
        yield line if len(line) <= width else line[: width - 3] + "..."
    yield ""
    yield "`turnwise config KEY` says more: when to touch it, what it takes, who reads it."


def _page(page: "KnobPage", readers: dict[str, str]) -> Iterator[str]:
    """The lines that describe one key: its text, its default, what it takes and which modules read it."""
    from turnwise.config.docs import shown

    default = shown(page.knob.default)
    yield f"{page.key}={default}" if "\n" not in default else page.key
    yield ""
    width = min(shutil.get_terminal_size().columns, FULL_WIDTH)
    yield from textwrap.wrap(page.text, width, initial_indent="  ", subsequent_indent="  ")
    yield ""
    by_task = "".join(f"; {shown(value)} with task={task}" for task, value in page.by_task.items())
    facts = [("default", default + by_task), ("takes", page.takes)]
    facts += [("", f"{choice}: {meaning}") for choice, meaning in page.choices().items()]
    facts += [("read", page.when or "always")]
    facts += [
        ("read by" if not number else "", f"{module}: {purpose}")
        for number, (module, purpose) in enumerate(readers.items())
    ]
    for name, text in facts:
        yield from textwrap.wrap(text, width, initial_indent=f"  {name:9}", subsequent_indent=" " * 13)
