"""What a notebook shows of work under way: one picture of bars, steps and curves, replaced while the work goes on.

Rich's own live display needs ipywidgets there; a picture of HTML needs nothing.
"""

import html
import io
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

SECONDS = 0.25
"""Between two pictures: each is a message to the browser."""
COLUMNS = 120
_WIDTH, _HEIGHT, _LEFT, _EDGE = 320, 120, 48, 14
warnings.filterwarnings("ignore", "IProgress not found")
"""tqdm's, when transformers is loaded in a notebook without ipywidgets: the pictures need none."""
_PRE = '<pre style="line-height:normal;font-family:monospace">{code}</pre>'


def in_notebook(console: Console) -> bool:
    """Whether this console's reader looks at a notebook."""
    return console.is_jupyter and not console.quiet


class NotebookPicture:
    """A place below the cell: `picture.show(table)` fills it, or replaces what it shows."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, renderable: RenderableType, above: str = "") -> None:
        """Show this, below HTML of the caller's own."""
        page = Console(file=io.StringIO(), record=True, width=COLUMNS, force_jupyter=False, force_terminal=True)
        page.print(renderable)
        text = page.export_text(clear=False)
        content = {"text/html": above + page.export_html(inline_styles=True, code_format=_PRE), "text/plain": text}
        if self._handle is None:
            self._handle = import_module("IPython.display").display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


class NotebookProgress(Progress):
    """A progress bar as a picture of a notebook."""

    def start(self) -> None:
        """Show the bar."""
        self._picture, self._drawn = NotebookPicture(), 0.0
        self._draw()

    def stop(self) -> None:
        """Leave the last picture standing."""
        self._draw()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Move on, and show it unless that was done a moment ago."""
        super().advance(task_id, advance)
        self._redraw()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Change a bar, and show it unless that was done a moment ago."""
        super().update(task_id, **changes)
        self._redraw()

    def _redraw(self) -> None:
        if time.monotonic() >= self._drawn + SECONDS:
            self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self._picture.show(self.get_renderable())


def progress_bars(console: Console) -> Progress:
    """Bars with what is done, its count and the time left, on a terminal or in a notebook."""
    columns: tuple[ProgressColumn, ...] = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    if in_notebook(console):
        return NotebookProgress(*columns, console=console, auto_refresh=False)
    return Progress(*columns, console=console, disable=console.is_jupyter)


def curves(series: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Small charts side by side as SVG, one for each name with two points or more."""
    return "".join(_chart(name, points) for name, points in series.items() if len(points) > 1)


def _chart(name: str, points: Sequence[tuple[int, float]]) -> str:
    first, last = points[0][0], points[-1][0]
    values = [value for _, value in points]
    least, most = min(values), max(values)
    wide, high = _WIDTH - _LEFT - _EDGE, _HEIGHT - 2 * _EDGE

    def place(step: int, value: float) -> str:
        x = _LEFT + wide * (step - first) / max(1, last - first)
        return f"{x:.1f},{_EDGE + high * (1 - (value - least) / ((most - least) or 1)):.1f}"

    line = " ".join(place(step, value) for step, value in points)
    words = (
        (_LEFT, 10, "start", html.escape(f"{name} {values[-1]:.3g}")),
        (_LEFT - 4, _EDGE + 6, "end", f"{most:.3g}"),
        (_LEFT - 4, _HEIGHT - _EDGE, "end", f"{least:.3g}"),
        (_LEFT, _HEIGHT - 2, "start", f"step {first}"),
        (_WIDTH - _EDGE, _HEIGHT - 2, "end", f"{last}"),
    )
    texts = "".join(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>' for x, y, anchor, text in words)
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" font-size="11" font-family="sans-serif" fill="currentColor">{texts}'
        f'<polyline points="{line}" fill="none" stroke="#3b82f6" stroke-width="1.5"/></svg>'
    )
