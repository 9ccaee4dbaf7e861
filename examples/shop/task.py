"""A whole task in one file: rows, a tool and a reward."""

from collections.abc import Iterator
from typing import Any

from turnwise import ToolError, Trajectory, tool

PRICES = {"pen": 3, "hat": 12, "map": 7, "cup": 5}


@tool
async def price(item: str) -> str:
    """Look up what one item costs, in dollars."""
    if item not in PRICES:
        raise ToolError(f"no item {item!r}; there are {', '.join(PRICES)}")
    return str(PRICES[item])


def rows(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Every item in two numbers for training, in a third for testing."""
    for count in (2, 5) if split == "train" else (3,):
        for item, cost in PRICES.items():
            yield {
                "data_source": "shop",
                "prompt": [{"role": "user", "content": f"What do {count} {item}s cost? End with #### and the number."}],
                "reward_model": {"ground_truth": str(count * cost)},
            }


async def correct(trajectory: Trajectory) -> float:
    """1 for the right number after ####, in what the assistant itself said last."""
    said = trajectory.answers[-1].visible if trajectory.answers else ""
    return float(said.rpartition("####")[2].strip() == trajectory.sample.ground_truth)
