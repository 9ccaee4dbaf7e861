"""The cases of a new task: orders, what customers say of them, and what is right; the same at every call."""

import json
import random
from typing import Any

ITEMS = ("lamp", "chair", "clock", "kettle", "mirror", "radio", "scarf", "table")
SAYINGS = (
    "I want to return order {order}.",
    "Can I send order {order} back?",
    "The {item} of order {order} is not what I wanted.",
    "Please take order {order} back.",
)
IN_TIME, TOO_LATE = "in time", "too late"
"""Whether an order may still come back, in the words of its file."""
SPLITS = {"train": 800, "test": 64}


def files(tools: int, *, patience: bool) -> dict[str, str]:
    """The texts of orders.json, train.jsonl and test.jsonl."""
    rng = random.Random(0)
    numbers = rng.sample(range(1000, 10_000), sum(SPLITS.values()))
    orders = {str(number): {"item": rng.choice(ITEMS), "return": rng.choice((IN_TIME, TOO_LATE))} for number in numbers}
    cases = []
    for order, facts in orders.items():
        case: dict[str, Any] = {"says": rng.choice(SAYINGS).format(order=order, item=facts["item"])}
        case["right"] = _right(tools, order, facts["return"])
        patient_for = rng.randint(1, 3)
        cases.append(case | ({"patience": patient_for} if patience else {}))
    listed = ",\n".join(f"  {json.dumps(order)}: {json.dumps(facts)}" for order, facts in orders.items())
    texts, start = {"orders.json": f"{{\n{listed}\n}}\n"}, 0
    for split, count in SPLITS.items():
        lines = [json.dumps(case) for case in cases[start : start + count]]
        texts[f"{split}.jsonl"], start = "\n".join(lines) + "\n", start + count
    return texts


def _right(tools: int, order: str, state: str) -> str | list[str]:
    """The right answer, or the right acts where there are tools to act with."""
    if tools == 1:
        return "yes" if state == IN_TIME else "no"
    if state == IN_TIME:
        return [f"refund {order}"]
    return [f"escalate {order}"] if tools > 2 else []
