"""What an episode of `tinylook` is worth: TAPO with the target boxes as the judge, and tools needless on `none`."""

from collections.abc import Mapping

from turnwise.ext.judge.tapo import tapo
from turnwise.ext.tinylook.language import Puzzle
from turnwise.scoring.client_options import client_options
from turnwise.scoring.scorer import Score
from turnwise.types import Trajectory

NEED: dict[str, str] = {f"tinylook/{puzzle}": "none" if puzzle is Puzzle.NONE else "search" for puzzle in Puzzle}
"""Whether a data source needs tools, as `tapo` reads it."""


@client_options("acc_weight", "format_weight", "tool_weight", "needless", "tool_misuse", "max_crop")
async def tinylook(
    trajectory: Trajectory,
    *,
    acc_weight: float = 1.0,
    format_weight: float = 0.3,
    tool_weight: float = 0.5,
    needless: float = -0.25,
    tool_misuse: Mapping[str, float] | None = None,
    max_crop: float = 0.9,
) -> Score:
    """`tapo` without a language model. `tool_weight=0` pays for right answers and their form only."""
    return await tapo(
        trajectory,
        accuracy="text_match",
        accuracy_options={"tag": "answer"},
        acc_weight=acc_weight,
        format_weight=format_weight,
        tool_weight=tool_weight,
        need=NEED,
        judge="boxes",
        needless=needless,
        tool_misuse=tool_misuse,
        max_crop=max_crop,
    )
