"""Detectors that search all of a run for trouble that came and went, which its first and last stretch do not show."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from turnwise.ext.board.findings import (
    CountShare,
    DetectorFinding,
    Severity,
    expression,
    graded,
    matches,
    percent,
    plain,
    span,
)
from turnwise.ext.board.series import Series
from turnwise.ext.board.steps import SHORTEST_WINDOW, Floats, Ints, Rows, totals, windows
from turnwise.ext.board.table import Table

SURE = 5.0
"""Standard errors above what came before and after, each group counting once, since siblings are alike. Many stretches
are tried: of 190 simulated runs of 60 to 2000 steps without a burst, one passed it by chance."""
FLAT_WATCH, FLAT_ALARM = 0.3, 0.6
"""Points of the share of groups that are all wrong. Hard samples come together now and then."""
BURST_WATCH, BURST_ALARM = 0.1, 0.3
"""Points of the share of episodes above those before and after. A tenth is a bad batch or two; after a third of some
steps' episodes the policy has learned from them."""
MOST_NAMED = 8
"""Steps in one sentence."""
CALLS_WATCH, UNUSUAL, FEWEST_CALLS, FEWEST_GROUPS = 0.1, 5.0, 50, 3
"""A step whose calls are malformed this often, so many times as often as in the median step, of so many calls in all
and in so many groups: a few episodes that repeat a broken call are no burst of episodes."""
FAILED_WATCH, FAILED_ALARM = 0.05, 0.3
"""The same for failed episodes, which are left out of learning: a busy machine makes one in a hundred."""
DIP = 0.5
"""Deviations of the reward below what came before and after; it came back, so never an alarm."""
LONGER = 1.5
"""Times the tokens before and after; within it lies what a change of the data mix makes."""


@dataclass(frozen=True, slots=True)
class Burst:
    """Steps that stand out (places among the run's steps, the end not included), and three means."""

    start: int
    end: int
    before: float
    inside: float
    after: float

    @property
    def excess(self) -> float:
        """By how much it stands above the nearer of its neighbours."""
        return self.inside - max(self.before, self.after)

    def steps(self, steps: Ints) -> tuple[int, int]:
        """The first and last step of the burst, given the steps of all rows."""
        return int(steps[self.start]), int(steps[self.end - 1])


def find_burst(rows: Rows, values: Floats) -> Burst | None:
    """The steps whose values stand most surely above those before and after; None when none surely do.

    Bursts of every length from one step on are tried; each is compared with as many steps on either side, at least
    a window's. At least four steps must come before it: what a run begins with is no burst.
    """
    at, values = _by_group(rows, values)
    size = len(rows.steps)
    sums = [totals(at, column, size) for column in (np.ones(len(at)), values, values**2)]
    count, total, square = (np.concatenate([[0.0], np.cumsum(by_step)]) for by_step in sums)

    def stretch(first: Ints, last: Ints) -> tuple[Floats, Floats, Floats]:
        return count[last] - count[first], total[last] - total[first], square[last] - square[first]

    best, burst, length = SURE, None, 1
    reach = windows(rows).length
    while SHORTEST_WINDOW + length < size:
        start = np.arange(SHORTEST_WINDOW, size - length)
        end, wide = start + length, max(reach, length)
        inside = stretch(start, end)
        sides = stretch(np.maximum(start - wide, 0), start), stretch(end, np.minimum(end + wide, size))
        above = np.minimum(*(_surely_above(inside, side) for side in sides))
        at_best = int(above.argmax())
        if above[at_best] > best:
            means = (float(side[1][at_best] / side[0][at_best]) for side in (sides[0], inside, sides[1]))
            best, burst = float(above[at_best]), Burst(int(start[at_best]), int(end[at_best]), *means)
        length = max(length + 1, length * 5 // 4)
    return burst


def _by_group(rows: Rows, values: Floats) -> tuple[Ints, Floats]:
    """The mean of each group whose values are known, and the step it is of."""
    finite = np.flatnonzero(np.isfinite(values))
    _, first, group = np.unique(_groups(rows)[finite], return_index=True, return_inverse=True)
    means = totals(group, values[finite], len(first)) / np.maximum(np.bincount(group, minlength=len(first)), 1)
    return rows.at[finite[first]], means


def _groups(rows: Rows) -> Ints:
    """A number for each row's group."""
    sample = rows.codes("sample_id")
    shard = rows.snapshot.shard_index[rows.rows].astype(np.int64)
    return np.asarray(shard * (int(sample.max(initial=0)) + 1) + sample)


def _surely_above(inside: tuple[Floats, Floats, Floats], side: tuple[Floats, Floats, Floats]) -> Floats:
    """By how many standard errors means lie above others; their variance is that of both together."""
    with np.errstate(invalid="ignore", divide="ignore"):
        number = inside[0] + side[0]
        variance = (inside[2] + side[2]) / number - ((inside[1] + side[1]) / number) ** 2
        error = np.sqrt(np.maximum(variance, 0.0) * (1 / inside[0] + 1 / side[0]))
        sure = (inside[1] / inside[0] - side[1] / side[0]) / error
    return np.nan_to_num(sure, nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True, slots=True)
class _Trouble:
    """Something that episodes have or have not, by a filter's condition."""

    id: str
    title: str
    seen: str
    condition: str
    advice: str
    metrics: tuple[str, ...]
    has: Callable[[Rows], Floats]
    levels: tuple[float, float] = (BURST_WATCH, BURST_ALARM)


def _find(table: Table, trouble: _Trouble, *, calls: bool = True) -> DetectorFinding | None:
    rows = Rows.of(table, "train")
    if not len(rows) or (calls and not rows.number("calls").sum()):
        return None
    hits = trouble.has(rows)
    burst = find_burst(rows, hits)
    severity = Severity.OK if burst is None else graded(burst.excess, *trouble.levels)
    if burst is None or severity is Severity.OK:
        text = f"No stretch of the run has surely more {trouble.seen} than the steps before and after it."
        return DetectorFinding(trouble.id, Severity.OK, trouble.title, text, metrics=trouble.metrics)
    steps = burst.steps(rows.steps)
    here = (rows.at >= burst.start) & (rows.at < burst.end)
    share = CountShare.within(hits == 1, here & np.isfinite(hits))
    text = (
        f"{trouble.seen[0].upper()}{trouble.seen[1:]}: {share} in {span(steps)}, "
        f"{percent(burst.before)} before it and {percent(burst.after)} after it."
    )
    listed = expression(trouble.condition, steps=steps)
    return DetectorFinding(
        trouble.id,
        severity,
        trouble.title,
        text,
        trouble.advice,
        steps,
        listed,
        "train",
        trouble.metrics,
        matches(rows, listed),
    )


def malformed_burst(table: Table, series: Series) -> DetectorFinding | None:
    """Steps in which calls could not be read: in many episodes, or again and again in a few."""
    trouble = _Trouble(
        "malformed_burst",
        "A burst of malformed calls",
        "episodes with a call that could not be read",
        "malformed > 0",
        "Read what was written instead of a call, and what the policy had learned in the steps before; if the "
        "reward of these steps is no lower than before, broken calls are rewarded.",
        ("tool_calls/malformed", "critic/score/mean"),
        lambda rows: (rows.number("malformed") > 0).astype(np.float64),
    )
    finding = _find(table, trouble)
    if finding is None or finding.severity is not Severity.OK:
        return finding
    return _malformed_step(Rows.of(table, "train"), trouble) or finding


def _malformed_step(rows: Rows, trouble: _Trouble) -> DetectorFinding | None:
    """The step with the largest share of malformed calls, if it stands out; never an alarm: few episodes made it."""
    size = len(rows.steps)
    broken = rows.number("malformed")
    calls, malformed = totals(rows.at, rows.number("calls"), size), totals(rows.at, broken, size)
    share = malformed / np.maximum(calls, 1)
    at, parts = _by_group(rows, (broken > 0).astype(np.float64))
    groups = totals(at, parts > 0, size)
    usual = float(np.median(share))
    stands_out = (calls >= FEWEST_CALLS) & (groups >= FEWEST_GROUPS) & (share >= max(CALLS_WATCH, UNUSUAL * usual))
    stands_out[:SHORTEST_WINDOW] = False  # what a run begins with is no burst
    if not stands_out.any():
        return None
    index = int(np.where(stands_out, share, 0.0).argmax())
    step = int(rows.steps[index])
    listed = expression(trouble.condition, steps=(step, step))
    others = [str(other) for other in rows.steps[stands_out].tolist() if other != step]
    text = (
        f"{percent(float(share[index]))} ({malformed[index]:,.0f} of {calls[index]:,.0f}) of the calls of step {step} "
        f"could not be read, in {matches(rows, listed):,} episodes; {percent(usual)} in the median step."
        + (f" As unusual: step {', '.join(others[:MOST_NAMED])}." if others else "")
    )
    return DetectorFinding(
        trouble.id, Severity.WATCH, trouble.title, text, trouble.advice, (step, step), listed, "train",
        trouble.metrics, matches(rows, listed),
    )  # fmt: skip


def tool_error_burst(table: Table, series: Series) -> DetectorFinding | None:
    """A finding about steps in which many tool calls failed."""
    return _find(
        table,
        _Trouble(
            "tool_error_burst",
            "A burst of failing tool calls",
            "episodes with a call that failed",
            "failed_calls > malformed",
            "See on the page of tools how they failed: a service that was down teaches the policy not to call it.",
            ("tool_calls/error", "tool_calls/timeout", "tool_calls/bad_arguments"),
            lambda rows: (rows.number("failed_calls") > rows.number("malformed")).astype(np.float64),
        ),
    )


def truncation_burst(table: Table, series: Series) -> DetectorFinding | None:
    """Steps whose episodes were cut off."""
    return _find(
        table,
        _Trouble(
            "truncation_burst",
            "A burst of truncated episodes",
            "episodes cut off by a token or context limit",
            "truncated == true",
            "Read how these episodes end; text that does not end is learned from as a wrong answer.",
            ("response_length/clip_ratio", "response_length/mean"),
            lambda rows: (rows.number("truncated") == 1).astype(np.float64),
        ),
        calls=False,
    )


def failure_burst(table: Table, series: Series) -> DetectorFinding | None:
    """Steps whose episodes failed for want of infrastructure."""
    return _find(
        table,
        _Trouble(
            "failure_burst",
            "A burst of failed episodes",
            "episodes that failed",
            "failure != null",
            "See what failed at that time. These steps learned only from the episodes that did not fail.",
            ("trajectories/failed", "scoring/failure_rate"),
            lambda rows: (rows.codes("failure") >= 0).astype(np.float64),
            (FAILED_WATCH, FAILED_ALARM),
        ),
        calls=False,
    )


def print_only_burst(table: Table, series: Series) -> DetectorFinding | None:
    """Steps with code that only says what is written in it."""
    return _find(
        table,
        _Trouble(
            "print_only_burst",
            "A burst of code that only prints",
            "episodes with code that only prints what is written in it",
            "print_only > 0",
            "A habit that came and went; look what the reward paid for in these steps.",
            ("tool_call_counts/mean", "critic/score/mean"),
            lambda rows: (rows.number("print_only") > 0).astype(np.float64),
        ),
    )


def duplicate_burst(table: Table, series: Series) -> DetectorFinding | None:
    """Steps whose episodes repeat their calls."""
    return _find(
        table,
        _Trouble(
            "duplicate_burst",
            "A burst of repeated calls",
            "episodes that repeat a call",
            "duplicate_calls > 0",
            "Look whether replies were cut or tools were slow in these steps, so that asking again seemed to help.",
            ("tool_call_counts/mean", "critic/score/mean"),
            lambda rows: (rows.number("duplicate_calls") > 0).astype(np.float64),
        ),
    )


def tools_unused_burst(table: Table, series: Series) -> DetectorFinding | None:
    """Steps in which tools were not called."""
    return _find(
        table,
        _Trouble(
            "tools_unused_burst",
            "A stretch without tool calls",
            "episodes that call no tool",
            "calls == 0",
            "Look whether tools failed or cost reward in the steps before, and whether the reward came with it.",
            ("tool_call_counts/mean", "critic/score/mean"),
            lambda rows: (rows.number("called") != 1).astype(np.float64),
        ),
    )


def flat_burst(table: Table, series: Series) -> DetectorFinding | None:
    """Steps whose groups were all wrong: nothing was learned in them."""
    return _find(
        table,
        _Trouble(
            "flat_burst",
            "A stretch of groups that are all wrong",
            "groups whose siblings are all equally wrong",
            "group_std == 0 and group_size > 1 and right == false",
            "These steps had next to no gradient: look for a run of hard samples, or for a tool that was away.",
            ("groups/flat", "critic/score/mean"),
            _flat_and_wrong,
            (FLAT_WATCH, FLAT_ALARM),
        ),
        calls=False,
    )


def _flat_and_wrong(rows: Rows) -> Floats:
    """1 or 0 at the first row of each group of several, nan elsewhere: a group counts once."""
    first = np.unique(_groups(rows), return_index=True)[1]
    wrong = (rows.grouped("group_std") == 0) & (rows.number("right") == 0)
    values = np.full(len(rows), np.nan)
    values[first] = np.where(rows.grouped("group_size")[first] > 1, wrong[first], np.nan)
    return values


def reward_dip(table: Table, series: Series) -> DetectorFinding | None:
    """Steps in which the reward was far below what came before and after."""
    rows = Rows.of(table, "train")
    reward = rows.number("reward")
    if not np.isfinite(reward).any():
        return None
    title, metrics = "A dip of the reward", ("critic/score/mean", "val/accuracy")
    burst, deviation = find_burst(rows, -reward), float(np.nanstd(reward))
    if burst is None or burst.excess < DIP * deviation:
        text = f"No stretch lies {DIP:g} deviations of the reward below the steps before and after it."
        return DetectorFinding("reward_dip", Severity.OK, title, text, metrics=metrics)
    steps = burst.steps(rows.steps)
    text = (
        f"The reward was {plain(-burst.inside)} in {span(steps)}, {plain(-burst.before)} before it and "
        f"{plain(-burst.after)} after it."
    )
    listed = expression(f"reward < {plain(-burst.before)}", steps=steps)
    advice = "It came back. Compare these episodes with those before: another mix of samples, a tool, or a bad update."
    return DetectorFinding(
        "reward_dip", Severity.WATCH, title, text, advice, steps, listed, "train", metrics, matches(rows, listed)
    )


def length_burst(table: Table, series: Series) -> DetectorFinding | None:
    """Steps whose episodes are far longer than those before and after."""
    rows = Rows.of(table, "train")
    if not len(rows):
        return None
    tokens = rows.number("policy_tokens")
    title, metrics = "A burst of long episodes", ("response_length/mean", "response_length/clip_ratio")
    burst = find_burst(rows, tokens)
    if burst is None or burst.inside < LONGER * max(burst.before, burst.after):
        text = f"No stretch's episodes are {LONGER:g} times as long as those before and after it."
        return DetectorFinding("length_burst", Severity.OK, title, text, metrics=metrics)
    steps = burst.steps(rows.steps)
    text = (
        f"The policy wrote {plain(burst.inside)} tokens an episode in {span(steps)}, {plain(burst.before)} before it "
        f"and {plain(burst.after)} after it."
    )
    listed = expression(f"policy_tokens > {plain(max(burst.before, burst.after))}", steps=steps)
    advice = "Look for repetition and text that does not end; it was learned from, and a length bound would prevent it."
    return DetectorFinding(
        "length_burst", Severity.WATCH, title, text, advice, steps, listed, "train", metrics, matches(rows, listed)
    )
