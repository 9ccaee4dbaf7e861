"""A whole task in one file: rows, two tools, an interaction, a reward and a metric."""

from collections.abc import Iterator
from typing import Any

from turnwise import Reduction, Reply, Task, ToolError, Trajectory, UserTurn, tool

PRICES = {"pen": 3, "hat": 12, "map": 7, "cup": 5}


@tool
async def price(item: str) -> str:
    """Look up what one item costs, in dollars."""
    if item not in PRICES:
        raise ToolError(f"no item {item!r}; there are {', '.join(PRICES)}")
    return str(PRICES[item])


@tool
async def total(amount: int, count: int) -> str:
    """Multiply the price of one item by how many are bought."""
    return str(amount * count)


async def customer(turn: UserTurn) -> Reply | str:
    """The simulated user: asks once whether the price was looked up, then thanks."""
    return "Did you look the price up? Please check." if turn.number == 1 else Reply("Thank you.", end=True)


def rows(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Every item in two numbers for training, in a third for testing."""
    for count in (2, 5) if split == "train" else (3,):
        for item, cost in PRICES.items():
            yield {
                "prompt": [{"role": "user", "content": f"What do {count} {item}s cost? End with #### and the number."}],
                "reward_model": {"ground_truth": str(count * cost)},
            }


async def correct(trajectory: Trajectory) -> float:
    """1 for the right number after ####, in what the assistant itself said last."""
    said = trajectory.answers[-1].visible if trajectory.answers else ""
    return float(said.rpartition("####")[2].strip() == trajectory.sample.ground_truth)


def metrics(trajectory: Trajectory) -> dict[str, float]:
    """Whether the price was looked up at all."""
    return {"looked_up": float(any(record.call.name == "price" for record in trajectory.calls))}


TASK = Task(
    name="shop",
    rows=rows,
    tools=[price, total],
    interaction=customer,
    scorer=correct,
    metrics=metrics,
    reductions={"looked_up": Reduction.MEAN},
    defaults={"eval.samples": None, "training.groups": 4, "rollout.max_user_turns": 2},
)
