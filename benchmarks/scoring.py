"""Rates of the rule scorers on one core, what scoring adds around a scorer, and what the pool costs per item.

Trajectories are recorded-looking GSM8K episodes: a tool call, its reply, an answer in one of the forms models write;
the ledger is as long as such an episode's, because a pool has to carry it. Inline rates are per second of this
process's CPU time (of `math` without its checkers), so that a busy machine does not change them; medians over rounds.
`alone` is the scorer's coroutine by itself, `applied` is with checking and writing the reward, which is what a run
does. The pool is measured in wall time.

    python benchmarks/scoring.py [--trajectories 5000] [--rounds 7] [--workers 2] [--no-pool]
"""

import argparse
import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable
from statistics import median

from turnwise.chat.formats import hermes
from turnwise.config import ScoringConfig
from turnwise.config.choices import ScoringRun
from turnwise.scoring.scorer import Scorer, ScorerSpec, apply, evaluate
from turnwise.scoring.service import make_runner
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Ledger,
    Message,
    Origin,
    Role,
    Sample,
    StopReason,
    Trajectory,
    Turn,
)

TARGET = 10_000
TOKENS = 400
STEPS = "Each of the {n} boxes holds 12 pens, so there are {n} * 12 pens; {m} were given away. "
FORMS = ("#### {m}", "#### ${m}.00", "**{m}**\n\n#### {m}", "The answer is {m}.", "\\boxed{{{m}}}", "I cannot tell.")


def episode(number: int, draw: random.Random) -> Trajectory:
    """A tool turn and an answer."""
    n, m = draw.randint(2, 99), draw.randint(2, 99_999)
    prompt = (Message(Role.USER, STEPS.format(n=n, m=m) * 2 + "How many are left?"),)
    call = f'<tool_call>\n{{"name": "calculate", "arguments": {{"expression": "{n} * 12"}}}}\n</tool_call>'
    first = hermes.parse(STEPS.format(n=n, m=m) + call, turn=0, in_reasoning=False)
    said = STEPS.format(n=n, m=m) * 3 + "\n" + draw.choice(FORMS).format(m=f"{m + draw.randint(0, 1):,}")
    second = hermes.parse(said, turn=1, in_reasoning=False)
    reply = Message(Role.TOOL, str(n * 12), tool_call_id=first.tool_calls[0].id)
    ledger = Ledger()
    ledger.append(range(TOKENS // 2), Origin.PROMPT, 0)
    ledger.append(range(TOKENS // 2), Origin.POLICY, 0, [-0.25] * (TOKENS // 2), 0)
    record = CallRecord(first.tool_calls[0], CallStatus.OK, 0.01)
    turns = [
        Turn(0, first, FinishReason.STOP, 0, 100, 60, calls=[record], replies=[reply]),
        Turn(1, second, FinishReason.STOP, 0, 200, 120),
    ]
    sample = Sample(f"s{number}", prompt, "openai/gsm8k", str(m))
    return Trajectory(sample, 0, 0, [*prompt, first, reply, second], turns, [ledger], StopReason.ANSWERED, 0.1)


async def rate(
    work: Callable[[Trajectory], Awaitable[object]],
    trajectories: list[Trajectory],
    rounds: int,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """Trajectories a second, one after the other."""
    found = []
    for _ in range(rounds):
        start = clock()
        for trajectory in trajectories:
            await work(trajectory)
        found.append(len(trajectories) / (clock() - start))
    return median(found)


async def inline(trajectories: list[Trajectory], rounds: int) -> dict[str, float]:
    """Every rule scorer in this process; seconds per item by scorer."""
    options: dict[str, dict[str, object]] = {
        "gsm8k": {},
        "gsm8k_strict": {},
        "gsm8k_flexible": {},
        "exact_match": {},
        "text_match": {"how": "f1"},
        "format_rules": {"required": ["####"], "forbidden": ["sorry"], "max_chars": 2000},
        "math": {},
    }
    found = {}
    print(f"{'inline, one core':<20} {'alone':>12} {'checked':>12} {'applied':>12}   items/s")
    for name, given in options.items():
        scorer = ScorerSpec(name, given).make()
        alone = await rate(scorer, trajectories, rounds)
        checked = await rate(lambda one, by=scorer: evaluate(by, one), trajectories, rounds)
        applied = await rate(lambda one, by=scorer: apply(by, one), trajectories, rounds)
        met = "" if name != "gsm8k" else f"  target {TARGET:,}: {'met' if applied >= TARGET else 'MISSED'}"
        print(f"{name:<20} {alone:12,.0f} {checked:12,.0f} {applied:12,.0f}{met}", flush=True)
        found[name] = 1 / applied
    return found


async def pooled(trajectories: list[Trajectory], rounds: int, workers: int, inline_seconds: float) -> None:
    """The same through the pool: one after the other, and all at once."""
    runner = make_runner(ScoringConfig(run=ScoringRun.pool, workers=workers))
    scorer: Scorer = runner.scorer(ScorerSpec("gsm8k"))
    await runner.start()
    try:
        one_by_one = 1 / await rate(lambda one: apply(scorer, one), trajectories, rounds, time.perf_counter)
        spent = []
        for _ in range(rounds):
            start = time.perf_counter()
            await asyncio.gather(*(apply(scorer, one) for one in trajectories))
            spent.append((time.perf_counter() - start) / len(trajectories))
    finally:
        await runner.stop()
    print(f"\n{f'pool, {workers} workers':<30} {'us/item':>9} {'overhead us/item':>18}")
    for name, seconds in (("one after the other", one_by_one), ("all at once", median(spent))):
        print(f"{name:<30} {seconds * 1e6:9.0f} {(seconds - inline_seconds) * 1e6:18.0f}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-pool", action="store_true")
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core; the pool's workers get all of them back
    draw = random.Random(7)
    trajectories = [episode(number, draw) for number in range(args.trajectories)]
    seconds = asyncio.run(inline(trajectories, args.rounds))
    if not args.no_pool:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        asyncio.run(pooled(trajectories[:1000], 3, args.workers, seconds["gsm8k"]))


if __name__ == "__main__":
    main()
