"""The numbers of one data source in an evaluation, and the tables of several: a column for each, or a row."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from turnwise.reports.task_metrics import COUNT
from turnwise.rollout.toolbox.report import ToolReport
from turnwise.storage.transcript import visible
from turnwise.system.metrics import Share

CAPTION = "± is one standard error; episodes of one sample count as one cluster"
LONGEST_ERROR_SHOWN = 60
LEAST_NAME = 8
"""Cells for the name of a data source, which is folded, before numbers are cut."""
_BETWEEN = 2
"""Blanks between the columns of a table of rows."""


@dataclass(frozen=True, slots=True)
class SourceReport:
    """The numbers of one data source. Failed episodes are counted and left out of every average."""

    data_source: str
    episodes: int
    failed: int
    n: int
    """Episodes that were scored: those that accuracy is of."""
    samples: int
    """Different samples among them."""
    accuracy: float | None
    accuracy_stderr: float | None
    first_accuracy: float | None
    first_accuracy_stderr: float | None
    wrong_to_right: int
    right_to_wrong: int
    reward: float | None
    num_turns: float | None
    tool_calls: int
    calls_by_status: dict[str, int]
    tools: dict[str, ToolReport]
    episodes_with_valid_call: float | None
    user_turns: float | None
    stop_reasons: dict[str, int]
    policy_tokens: int
    prompt_tokens: float | None
    render_exact: float | None
    render_same_text: float | None = None
    """Of the checked episodes, those whose tokens a full render cuts otherwise though it has the same text."""
    segments: float | None = None
    """Sequences an episode: more than one where the chat template rewrites history, or the loop forks."""
    task: dict[str, float] = field(default_factory=dict)
    """What the task itself measures, by its own names."""
    repeated: dict[str, Share] = field(default_factory=dict)
    """`pass@k`, `pass^k`, `maj@k` and `avg@k`, where samples have several episodes (`eval.group_size`)."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A table that is made when it is known how wide it may be."""

    table: Callable[[int], Table]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table(options.max_width)


def by_column(sources: Sequence[SourceReport], title: str) -> Table:
    """All numbers, a column for each data source."""
    table = Table(title=title, caption=CAPTION)
    table.add_column("")
    for source in sources:
        table.add_column(Text(visible(source.data_source)), justify="right")
    cells = [_cells(source) for source in sources]
    for label in dict.fromkeys(label for column in cells for label in column):
        table.add_row(Text(label), *(Text(column.get(label, "-")) for column in cells))
    return table


def narrowest(sources: Sequence[SourceReport]) -> int:
    """How wide `by_column` must be for names and accuracies to stand on one line each."""
    cells = [_cells(source) for source in sources]
    labels = max(cell_len(label) for column in cells for label in column)
    columns = [max(cell_len(visible(report.data_source)), cell_len(str(_accuracy(report)))) for report in sources]
    return 1 + sum(width + 3 for width in (labels, *columns))  # a line and two blanks


def by_row(sources: Sequence[SourceReport], overall: Share | None, title: str, width: int) -> Table:
    """The numbers that matter most, a row for each data source and one for all; what a task measures as far as it fits.

    The rest is in the evaluation's file, which the caption names.
    """
    first, names = _names(sources)
    columns = {first: names} | {label: list(map(cell, sources)) for label, cell in _row_cells(sources).items()}
    left_out: list[str] = []
    for measure in dict.fromkeys(name for source in sources for name in source.task if name != COUNT):
        label = f"task: {visible(measure)}" if visible(measure) in columns else visible(measure)
        column = {label: [_number(source.task.get(measure), ".3g") for source in sources]}
        if _width(columns | column) <= width:
            columns |= column
        else:
            left_out += column
    rest = f"{', '.join(left_out)} and all else" if left_out else "all other numbers"
    caption = f"{CAPTION}\ntools: episodes with a valid call; {rest}: eval/step_000000.json"
    table = Table(title=title, caption=caption, box=None, padding=(0, _BETWEEN, 0, 0), pad_edge=False)
    others = _width({label: cells for label, cells in columns.items() if label != first})
    room = max(LEAST_NAME, width - others - _BETWEEN)
    table.add_column(Text(first), overflow="fold", width=min(room, _width({first: names})))
    for label in [*columns][1:]:
        table.add_column(Text(label), justify="right", no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, row))
    if overall is not None:
        of_all = {first: "all", "n": str(overall.n), "accuracy": _short(overall)}
        table.add_row(*(of_all.get(label, "") for label in columns))
    return table


def _names(sources: Sequence[SourceReport]) -> tuple[str, list[str]]:
    """What all names begin with, up to a slash, and their ends: one family of sources need not say it in every row."""
    names = [source.data_source.split("/") for source in sources]
    folders = zip(*(name[:-1] for name in names), strict=False)
    shared = [level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, folders)]
    return visible("".join(f"{level_name}/" for level_name in shared)), [
        visible("/".join(name[len(shared) :])) for name in names
    ]


def _row_cells(sources: Sequence[SourceReport]) -> dict[str, Callable[[SourceReport], str]]:
    """What a row says of its data source; failures and first answers only where there is something to say."""
    cells: dict[str, Callable[[SourceReport], str]] = {"n": lambda source: str(source.n)}
    if any(source.failed for source in sources):
        cells["failed"] = lambda source: str(source.failed)
    if any(source.wrong_to_right or source.right_to_wrong for source in sources):
        cells["first"] = lambda source: _number(source.first_accuracy, ".1%")
    cells["accuracy"] = lambda source: _short(_accuracy(source))
    cells["turns"] = lambda source: _number(source.num_turns)
    cells["tools"] = lambda source: _number(source.episodes_with_valid_call, ".0%")
    return cells


def _width(columns: Mapping[str, Sequence[str]]) -> int:
    widths = [max(map(cell_len, (label, *cells))) for label, cells in columns.items()]
    return sum(widths) + _BETWEEN * (len(widths) - 1)


def _accuracy(source: SourceReport) -> Share | None:
    value, stderr = source.accuracy, source.accuracy_stderr
    return None if value is None or stderr is None else Share(value, stderr, source.n, source.samples)


def _short(share: Share | None) -> str:
    """Without its counts, which have a column."""
    return "-" if share is None else str(share).partition(" (")[0]


def _number(value: float | None, how: str = ".2f") -> str:
    return "-" if value is None else format(value, how)


def _cells(source: SourceReport) -> dict[str, str]:
    def accuracy(value: float | None, stderr: float | None) -> str:
        return "-" if value is None or stderr is None else str(Share(value, stderr, source.n, source.samples))

    def of_all(part: float | None) -> str:
        return "-" if part is None else f"{round(part * source.n)} of {source.n}"

    same_text = f", {round(other * source.n)} more in text" if (other := source.render_same_text) else ""
    return {
        "episodes": str(source.episodes),
        "failed episodes": str(source.failed),
        "accuracy, first answer": accuracy(source.first_accuracy, source.first_accuracy_stderr),
        "accuracy, final answer": accuracy(source.accuracy, source.accuracy_stderr),
        **{name: str(number) for name, number in source.repeated.items()},
        "flipped wrong -> right": str(source.wrong_to_right),
        "flipped right -> wrong": str(source.right_to_wrong),
        "reward": _number(source.reward),
        "assistant turns": _number(source.num_turns),
        "user turns": _number(source.user_turns),
        "tool calls": str(source.tool_calls),
        **{visible(f"  {name}"): _tool_cell(report) for name, report in source.tools.items()},
        "episodes with a valid call": of_all(source.episodes_with_valid_call),
        "stop reasons": ", ".join(f"{count} {reason}" for reason, count in source.stop_reasons.items()),
        "policy tokens": f"{source.policy_tokens:,}",
        "sequences an episode": _number(source.segments),
        "ledger equals full render": of_all(source.render_exact) + same_text,
    } | {f"task: {name}": f"{value:.3g}" for name, value in source.task.items()}


def _tool_cell(report: ToolReport) -> str:
    error, crash = report.commonest_error, report.commonest_crash
    notes = [] if error is None else [visible(error)]
    if crash is not None and error != f"Error: {crash}":
        notes.append(f"crashed: {visible(crash)}")
    return "\n".join([str(report), *(text[:LONGEST_ERROR_SHOWN] for text in notes)])
