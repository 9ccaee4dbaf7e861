"""`turnwise new NAME`: a folder with a task that runs, to be made one's own."""

import argparse
import enum
import re
import shlex
import sys
from pathlib import Path

from turnwise.errors import ConfigError, StorageError
from turnwise.errors.nearest_name import unknown

HELP = "write a folder with a runnable task: tools, a user, a reward, rows"


class UserKind(enum.StrEnum):
    """Who answers the assistant."""

    patient = enum.auto()
    impatient = enum.auto()
    none = enum.auto()


class RewardKind(enum.StrEnum):
    """How an episode is scored."""

    exact = enum.auto()
    two_part = enum.auto()


QUESTIONS = {
    "tools": (
        "How many tools? 1 looks an order up, 2 also refunds it, 3 also passes it on", ("1", "2", "3"), "3"
    ),
    "user": ("Who answers the assistant? patient or impatient: a customer; none: nobody", tuple(UserKind), "impatient"),
    "reward": ("What is rewarded? exact: the right thing; two_part: telling so, too", tuple(RewardKind), "two_part"),
}  # fmt: skip
"""By flag: the question, the answers and the default."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the folder to write; its name is the task's")
    for flag, (question, choices, default) in QUESTIONS.items():
        about = f"{question[0].lower()}{question[1:].replace('?', ':')} (default {default}; a terminal is asked)"
        parser.add_argument(f"--{flag}", choices=[str(choice) for choice in choices], help=about)
    parser.epilog = """\
examples:
  turnwise new support                                         three questions, then the folder support
  turnwise new support --tools 1 --user none --reward exact    the smallest one
"""


def run(args: argparse.Namespace) -> int:
    """Nothing that is there is overwritten."""
    folder = Path(args.name)
    if not _NAME.fullmatch(folder.name):
        raise ConfigError(f"{args.name!r}: a task's name has letters, digits and _, and begins with a letter")
    if folder.exists():
        raise ConfigError(f"there is a {str(folder)!r} already, and nothing is overwritten: take another name")
    chosen = {flag: getattr(args, flag) or _ask(*QUESTIONS[flag]) for flag in QUESTIONS}
    texts = _texts(folder, int(chosen["tools"]), UserKind(chosen["user"]), RewardKind(chosen["reward"]))
    try:
        folder.mkdir(parents=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror or error}") from error
    flags = " ".join(f"--{flag} {value}" for flag, value in chosen.items())
    file = shlex.quote(str(folder / "task.py"))
    sys.stdout.write(f"written: {folder} ({flags})\nnext: turnwise check task={file}; {folder / 'README.md'} goes on\n")
    return 0


def _ask(question: str, choices: tuple[str, ...], default: str) -> str:
    """The answer of who sits at the terminal, or the default where nobody does."""
    if not sys.stdin.isatty():
        return default
    while True:
        answer = input(f"{question} [{default}]: ").strip() or default
        if answer in choices:
            return answer
        sys.stdout.write(f"{unknown('answer', answer, choices)}\n")


def _texts(folder: Path, tools: int, user: UserKind, reward: RewardKind) -> dict[str, str]:
    """The text of each file of the new task, by its name."""
    import jinja2

    from turnwise.commands.new_task import cases

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(cases.__file__).parent),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    names = ["find_order", "refund", "escalate"][:tools]
    public = ["Task", "ToolError", "Trajectory", "tool"]
    public += ["Reply", "UserTurn"] if user is not UserKind.none else []
    public += ["Score"] if reward is RewardKind.two_part else []
    does = ("looks an order up", "looks an order up and refunds it", "looks an order up, refunds it or passes it on")
    values = {
        "name": folder.name,
        "file": shlex.quote(str(folder / "task.py")),
        "about": f"the assistant {does[tools - 1]}.",
        "tools": tools,
        "tool_names": names,
        "user": user.value,
        "reward": reward.value,
        "public": sorted(public, key=lambda name: (name.islower(), name)),
    }
    written = {name: templates.get_template(f"{name}.jinja").render(values) for name in ("task.py", "README.md")}
    return {**written, **cases.files(tools, patience=user is UserKind.impatient)}
