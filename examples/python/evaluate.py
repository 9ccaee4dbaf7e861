"""A task of one's own in Python: two tools, a user who asks back, a reward, and an evaluation."""

import math
import re
import sys
from collections.abc import Iterable

import turnwise as tw

SHELF = {"apples": 9, "eggs": 6, "marbles": 12, "stickers": 5}
SYSTEM = tw.Message(tw.Role.SYSTEM, "Solve the problem with the tools. End with #### and the number.")


@tw.tool
async def per_box(item: str) -> str:
    """Look up how many of an item are in one box."""
    if item not in SHELF:
        raise tw.ToolError(f"no item {item!r}; there are {', '.join(SHELF)}")
    return str(SHELF[item])


@tw.tool
async def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    if not re.fullmatch(r"[\d\s*+]+", expression):
        raise tw.ToolError("only whole numbers, * and +")
    return str(sum(math.prod(int(factor) for factor in term.split("*")) for term in expression.split("+")))


async def customer(turn: tw.UserTurn) -> tw.Reply:
    """Leaves with an answer; asks for one once when there is none."""
    served = "####" in turn.answer
    return tw.Reply("Please end with #### and the number.", score=float(served), end=served or turn.number > 1)


async def reward(trajectory: tw.Trajectory) -> tw.Score:
    """0.8 for the right number after ####, 0.2 for writing ####; `acc` is what accuracy counts."""
    said = trajectory.answers[-1].visible if trajectory.answers else ""
    right = float(said.rpartition("####")[2].strip() == trajectory.sample.ground_truth)
    return tw.Score(0.8 * right + 0.2 * ("####" in said), {"acc": right, "format": float("####" in said)})


def samples(counts: Iterable[int]) -> list[tw.Sample]:
    """One question for every item and number of boxes."""
    question = "There are {count} boxes with {size} {item} each. How many {item} are there?"
    return [
        tw.Sample(
            f"{count} boxes of {item}",
            (SYSTEM, tw.Message(tw.Role.USER, question.format(count=count, size=size, item=item))),
            "boxes",
            ground_truth=str(count * size),
        )
        for count in counts
        for item, size in SHELF.items()
    ]


if __name__ == "__main__":
    config = tw.configure("task=null", "sampling.max_tokens=48", *sys.argv[1:])
    report = tw.evaluate(config, samples=samples([3]), tools=[calculate, per_box], scorer=reward, interaction=customer)
    print(report)
    print("accuracy:", report.sources["boxes"].accuracy, "±", report.sources["boxes"].accuracy_stderr)
