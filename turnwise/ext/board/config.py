"""The section `board`: the board beside a run."""

from dataclasses import dataclass
from typing import ClassVar

from turnwise.config.knobs import at_least, knob, only, was
from turnwise.config.marks import may_change, only_watches


@dataclass
class BoardConfig:
    """The board beside a training run (docs/ext/board.md)."""

    EVERY_KNOB: ClassVar = (
        may_change(),
        only_watches(),
    )

    live: bool = knob(False, was("board"))
    """Beside a training run: serve the board in a process of its own, and say where. Switch it on to watch live."""
    port: int = knob(7007, at_least(0, 65535), only("board.live", "*"), was("board_port"))
    """The board's port; a free one is taken when another program has it. Set it when a tunnel expects another."""
