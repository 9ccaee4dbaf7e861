"""The bundled task: generated word problems of one to three steps, answered with tools and verified on request."""

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from turnwise.data.task import Script, ScriptedTurn, Task
from turnwise.data.write import write_rows
from turnwise.errors import DataError
from turnwise.errors.nearest_name import unknown
from turnwise.system.metrics import Reduction
from turnwise.types import CallStatus, Role, ToolCall, Trajectory

NAME = "arithmetic"
SYSTEM = "Solve the problem with the tools. End with #### and the number."
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo", "Ivy", "Jon", "Kim", "Leo")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pens", "shells", "stamps", "stickers")
SPLITS = ("train", "test")
PREPARED = {"train": 4000, "test": 500}
"""Rows that `turnwise prepare arithmetic` writes."""


@dataclass(frozen=True, slots=True)
class Family:
    """Problems of one kind. `right` and `wrong` are expressions over the numbers a, b, c, d.

    `steps` spells `right` out one operation at a time, `_` standing for the previous result. `grasp` is how often the
    scripted traces take the right expression: below one half the model learns to be wrong when greedy.
    """

    name: str
    texts: tuple[str, ...]
    right: str
    steps: tuple[str, ...]
    wrong: tuple[str, ...]
    grasp: float


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: `Problem(family, "Ada has 3 ...", {"a": 3, "b": 4}, answer=7)`."""

    family: Family
    question: str
    numbers: dict[str, int]
    answer: int


WEAK, FAIR = 0.27, 0.55
FAMILIES = (
    Family(
        "gain",
        ("{n} has {a} {t}. {m} gives {n} {b} more. How many {t} does {n} have?",
         "{n} found {a} {t} and then {b} more. How many {t} did {n} find?"),
        "a + b", ("a + b",), ("a - b", "a * b"), FAIR,
    ),
    Family(
        "loss",
        ("{n} had {a} {t} and lost {b}. How many {t} are left?",
         "{n} had {a} {t} and gave {b} to {m}. How many {t} does {n} have now?"),
        "a - b", ("a - b",), ("a + b", "b - a"), FAIR,
    ),
    Family(
        "boxes",
        ("There are {a} boxes with {b} {t} each. How many {t} are there?",
         "{n} fills {a} bags with {b} {t} each. How many {t} is that?"),
        "a * b", ("a * b",), ("a + b", "a - b"), FAIR,
    ),
    Family(
        "share",
        ("{n} shares {a} {t} equally among {b} friends. How many {t} does each get?",
         "{a} {t} are put into {b} equal piles. How many {t} are in each?"),
        "a / b", ("a / b",), ("a - b", "a * b"), WEAK,
    ),
    Family(
        "more_together",
        ("{n} has {a} {t}. {m} has {b} more than {n}. How many {t} do they have together?",),
        "a + a + b", ("a + b", "_ + a"), ("a + b", "a + b + b"), WEAK,
    ),
    Family(
        "fewer_together",
        ("{n} has {a} {t}. {m} has {b} fewer than {n}. How many {t} do they have together?",),
        "a + a - b", ("a - b", "_ + a"), ("a - b", "a + b"), WEAK,
    ),
    Family(
        "boxes_minus",
        ("{n} buys {a} packs of {b} {t} and gives {c} away. How many {t} are left?",
         "{n} earns {b} coins a day for {a} days and spends {c}. How many coins are left?"),
        "a * b - c", ("a * b", "_ - c"), ("a * b + c", "a + b - c"), FAIR,
    ),
    Family(
        "boxes_plus",
        ("{n} has {a} boxes of {b} {t} and {c} loose {t}. How many {t} are there?",),
        "a * b + c", ("a * b", "_ + c"), ("a + b + c", "a * b - c"), FAIR,
    ),
    Family(
        "twice",
        ("{n} sold {a} {t} on Monday and twice as many on Tuesday. How many {t} did {n} sell?",),
        "a + a * 2", ("a * 2", "_ + a"), ("a * 2", "a + 2"), WEAK,
    ),
    Family(
        "join_share",
        ("{n} has {a} {t} and buys {b} more, then shares them equally among {c} friends. How many {t} does each get?",),
        "(a + b) / c", ("a + b", "_ / c"), ("a + b - c", "a + b * c"), WEAK,
    ),
    Family(
        "shopping",
        ("{n} buys {a} {t} at {b} dollars each and {c} hats at {d} dollars each. How many dollars is that?",),
        "a * b + c * d", ("c * d", "a * b + _"), ("a * b + c + d", "a + b + c + d"), WEAK,
    ),
    Family(
        "leftover_sale",
        ("{n} has {a} boxes of {b} {t}, drops {c} of them, and sells the rest at {d} dollars each. "
         "How many dollars does {n} get?",),
        "(a * b - c) * d", ("a * b", "_ - c", "_ * d"), ("a * b - c * d", "(a * b - c) + d"), WEAK,
    ),
    Family(
        "three_people",
        ("{n} has {a} {t}. {m} has {b} times as many, and {o} has {c} fewer than {m}. How many {t} does {o} have?",),
        "a * b - c", ("a * b", "_ - c"), ("a + b - c", "a * b + c"), FAIR,
    ),
    Family(
        "days_then",
        ("{n} reads {a} pages a day for {b} days and then {c} pages a day for {d} days. How many pages is that?",),
        "a * b + c * d", ("c * d", "a * b + _"), ("a * b + c", "a + b + c + d"), FAIR,
    ),
)  # fmt: skip


def value(expression: str, numbers: dict[str, int]) -> float:
    """The value of one of this file's own expressions."""
    return float(eval(expression, {"__builtins__": {}}, dict(numbers)))


def write_out(expression: str, numbers: dict[str, int]) -> str:
    """The expression with its numbers put in."""
    return "".join(str(numbers[c]) if c in numbers else c for c in expression)


def problem_at(split: str, seed: int, index: int) -> Problem:
    """Problem number `index` of a split. Train and test share no family with the same numbers, whatever the seed."""
    rng = random.Random(f"{seed}/{split}/{index}")
    while True:
        family = rng.choice(FAMILIES)
        numbers = _draw(family, rng)
        if numbers is not None and split_of(family, numbers) == split:
            break
    n, m, o = rng.sample(NAMES, 3)
    question = rng.choice(family.texts).format(n=n, m=m, o=o, t=rng.choice(THINGS), **numbers)
    return Problem(family, question, numbers, int(value(family.right, numbers)))


def split_of(family: Family, numbers: dict[str, int]) -> str:
    """A fifth of all number choices is held out, decided by their hash."""
    text = family.name + ",".join(f"{key}{number}" for key, number in sorted(numbers.items()))
    return "test" if hashlib.blake2b(text.encode(), digest_size=4).digest()[0] % 5 == 0 else "train"


def _draw(family: Family, rng: random.Random) -> dict[str, int] | None:
    """Numbers of a problem, or None when its answer would not be a whole number from 1 to 9999."""
    used = sorted({c for c in family.right + "".join(family.wrong) if c in "abcd"})
    numbers = {key: rng.randint(2, 12) for key in used}
    if "*" not in family.right or family.name in ("twice",):
        numbers["a"] = rng.randint(2, 99)
        if "/" not in family.right and "b" in numbers:
            numbers["b"] = rng.randint(2, 99)
    if "c" in numbers and "- c" in family.right:
        numbers["c"] = rng.randint(2, 30)
    result = value(family.right, numbers)
    partial = [value(step, numbers) for step in family.steps if "_" not in step]
    if result != int(result) or not 1 <= result <= 9999 or min(partial) < 1:
        return None
    return numbers


def metrics(trajectory: Trajectory) -> dict[str, float]:
    """`verified`: of the episodes in which the user asked for a check, those with a `python` call that ran after it."""
    doubts = (n for n, turn in enumerate(trajectory.turns) if turn.replies and turn.replies[-1].role is Role.USER)
    doubt = next(doubts, None)
    if doubt is None:
        return {}
    later = [call for turn in trajectory.turns[doubt + 1 :] for call in turn.calls]
    return {"verified": float(any(call.call.name == "python" and call.status is CallStatus.OK for call in later))}


def rows(split: str, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows of a split without end, the same for the same seed."""
    if split not in SPLITS:
        raise DataError(unknown("split of arithmetic", split, SPLITS))
    index = 0
    while True:
        problem = problem_at(split, seed, index)
        yield {
            "data_source": NAME,
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem.question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
            "extra_info": {"split": split, "index": index, "seed": seed, "family": problem.family.name},
        }
        index += 1


def prepare(out: Path, *, seed: Annotated[int, "of the problems"] = 0) -> dict[Path, int]:
    """Write train.parquet and test.parquet; returns the rows of each file."""
    return {
        out / f"{split}.parquet": write_rows(list(islice(rows(split, seed), count)), out / f"{split}.parquet")
        for split, count in PREPARED.items()
    }


# --- traces to learn from before RL -------------------------------------------------------------------------------

# Mistakes are systematic (the wrong operation for a kind of problem), not noise: a model taught on them is wrong when
# greedy, too, and reinforcement has something to mend. The format is right nearly always.
STEPWISE = 0.25
"""Share of several-step problems worked out one call at a time."""
FIRST_MISTAKE = 0.8
"""Share of mistakes that take the family's most tempting wrong expression."""
MEND, SPOIL = 0.08, 0.08
"""After the user's doubt: how often a wrong expression is mended and a right one spoilt."""
BROKEN_CALL, BROKEN_JSON = 0.03, 0.015
"""How often a call is first written wrongly, and repaired after the tool's error."""


def script(seed: int) -> Script:
    """A Script for samples of the arithmetic task; the noise key decides every choice."""

    def say(request: ScriptedTurn) -> str:
        split, index = request.noise.sample.rsplit("/", 1)[-1].split(":")
        rng = random.Random(f"{request.noise.seed}/{request.noise.sample}/{request.noise.sibling}")
        actions = _actions(problem_at(split, seed, int(index)), rng)
        return actions[min(request.turn, len(actions) - 1)](request)

    return say


def _actions(problem: Problem, rng: random.Random) -> list[Script]:
    """What the assistant does, turn by turn: solve, answer, and after the doubt verify and answer again."""
    family = problem.family
    grasped = rng.random() < family.grasp
    first = family.right if grasped else _mistake(problem, rng)
    solve: list[Script]
    if grasped and len(family.steps) > 1 and rng.random() < STEPWISE:
        solve = [_step(write_out(step, problem.numbers)) for step in family.steps]
    else:
        solve = _calls("calculate", "expression", write_out(first, problem.numbers), rng)
    mended = rng.random() < (1 - SPOIL if grasped else MEND)
    second = family.right if mended else (_mistake(problem, rng) if grasped else first)
    verify = _calls("python", "code", f"print({write_out(second, problem.numbers)})", rng)
    return [*solve, _answer, *verify, _answer]


def _mistake(problem: Problem, rng: random.Random) -> str:
    wrong = problem.family.wrong
    return wrong[0] if rng.random() < FIRST_MISTAKE else rng.choice(wrong[1:])


def _calls(tool: str, argument: str, text: str, rng: random.Random) -> list[Script]:
    """One good call, sometimes after a broken one that the tool or the parser refuses."""
    call = ToolCall("", tool, {argument: text})
    chance = rng.random()
    if chance < BROKEN_CALL:
        broken = ToolCall("", tool, {argument: text[:-1] if text.endswith(")") else text + " +"})
        return [_write(broken), _write(call)]
    if chance < BROKEN_CALL + BROKEN_JSON:
        return [lambda request: request.call_format.render_malformed_call(call), _write(call)]
    return [_write(call)]


def _write(call: ToolCall) -> Script:
    return lambda request: request.call_format.render_call(call)


def _step(expression: str) -> Script:
    def act(request: ScriptedTurn) -> str:
        filled = expression.replace("_", _last_result(request))
        return str(request.call_format.render_call(ToolCall("", "calculate", {"expression": filled})))

    return act


def _answer(request: ScriptedTurn) -> str:
    return f"#### {_last_result(request)}"


def _last_result(request: ScriptedTurn) -> str:
    """The newest tool response, without the .0 of an even division."""
    responses = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", request.text, re.DOTALL)
    return re.sub(r"\.0$", "", str(responses[-1])) if responses else "0"


TASK = Task(
    name=NAME,
    rows=rows,
    endless=True,
    prepare=prepare,
    tools=("calculate", "python"),
    interaction="code_verify",
    scorer="gsm8k",
    reductions={"verified": Reduction.MEAN},
    metrics=metrics,
    script="turnwise.data.tasks.arithmetic:script",
    defaults={
        "sandbox.preload": [],
        "sampling.max_tokens": 96,
        "engine.max_batch": 128,
        "training.steps": 38,
        "training.groups": 24,
        "training.minibatches": 2,
        "algorithm.old_logprobs": "sampler",
        "training.eval_every": 19,
        "training.save_every": 19,
        "learner.lr": 3e-4,
        "learner.critic_lr": 1e-3,
    },
)
