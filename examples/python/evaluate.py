"""A task of one's own in Python: two tools, a user who asks back, a reward, and an evaluation."""

import sys
from typing import Any

import turnwise as tw

PRICES = {"pen": 3, "hat": 12, "map": 7, "cup": 5}
STOCK = {"pen": 40, "hat": 2, "map": 11, "cup": 0}


@tw.tool
async def price(item: str) -> str:
    """Look up what one item costs, in dollars."""
    if item not in PRICES:
        raise tw.ToolError(f"no item {item!r}; there are {', '.join(PRICES)}")
    return str(PRICES[item])


@tw.tool
async def stock(item: str) -> str:
    """Look up how many of an item are left."""
    return str(STOCK.get(item, 0))


class Customer(tw.BaseInteraction):
    """Asks once whether the answer is sure, then leaves."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        asked = sum(message["role"] == "user" for message in messages) > 1
        return asked, "" if asked else "Are you sure?", None, {}


async def reward(trajectory: tw.Trajectory) -> tw.Score:
    """0.8 for the right number after ####, 0.2 for writing ####; `acc` is what accuracy counts."""
    said = trajectory.answers[-1].visible if trajectory.answers else ""
    right = float(said.rpartition("####")[2].strip() == trajectory.sample.ground_truth)
    return tw.Score(0.8 * right + 0.2 * ("####" in said), {"acc": right, "format": float("####" in said)})


def samples(counts: tuple[int, ...]) -> list[tw.Sample]:
    """One question for every item and count."""
    return [
        tw.Sample(
            f"{count} {item}",
            (tw.Message(tw.Role.USER, f"What do {count} {item}s cost? End with #### and the number."),),
            "shop",
            ground_truth=str(count * cost),
        )
        for count in counts
        for item, cost in PRICES.items()
    ]


if __name__ == "__main__":
    config = tw.configure("task=null", "sampling.max_tokens=48", *sys.argv[1:])
    report = tw.evaluate(config, samples=samples((3,)), tools=[price, stock], scorer=reward, interaction=Customer)
    print(report)
    print("accuracy:", report.sources["shop"].accuracy, "±", report.sources["shop"].accuracy_stderr)
