"""Detectors that read how episodes went: their tools, their length, and what broke."""

import numpy as np

from turnwise.ext.board.findings import (
    CountShare,
    DetectorFinding,
    Gain,
    Severity,
    expression,
    graded,
    matches,
    percent,
    plain,
    rise,
    span,
)
from turnwise.ext.board.series import Series
from turnwise.ext.board.steps import Bools, Rows, windows
from turnwise.ext.board.table import Table

FEWEST_CALLS = 50
"""Fewer calls in a stretch say nothing about a habit."""
PRINT_WATCH, PRINT_ALARM = 0.1, 0.3
"""Of all calls. Code that prints a constant computes nothing: the policy calls because calling pays. Now and then is a
model thinking aloud; a third of all calls is a habit that training made."""
DUPLICATE_WATCH, DUPLICATE_ALARM = 0.15, 0.4
"""Of all calls. A repeat after a timeout is sensible and rare; untrained models repeat about one call in a hundred."""
MALFORMED_WATCH, MALFORMED_ALARM = 0.05, 0.2
"""Growth of the share of episodes with such a call. An exploring policy strays by a few in a hundred."""
TRUNCATED_WATCH, TRUNCATED_ALARM = 0.05, 0.2
"""Growth of the share of episodes that were cut. Those teach that their last words were wrong, whatever they were."""
LONGER_WATCH, LONGER_ALARM = 1.5, 2.5
SHORTER_WATCH, SHORTER_ALARM = 1 / 1.5, 1 / 2.5
"""Mean policy tokens, last stretch to first. Within a factor of 1.5 lies what a change of the data mix makes."""
PAID = 0.25
"""Deviations of the reward: a gain of at least this says that the change of length came with something."""
FAILED_WATCH, FAILED_ALARM = 0.01, 0.1
"""Of the last stretch's episodes. One in a hundred is a busy machine; one in ten changes which samples are learned."""
USED_BEFORE = 0.2
"""CountShare of episodes that called a tool at first; below it there was no habit to lose."""
VANISHED_WATCH, VANISHED_ALARM = 0.5, 0.1
"""What is left of that share."""


def print_only(table: Table, series: Series) -> DetectorFinding | None:
    """Code that only says what is written in it, as a share of all calls."""
    rows = Rows.of(table, "train")
    return _per_call(
        rows,
        column="print_only",
        levels=(PRINT_WATCH, PRINT_ALARM),
        title="Code that only prints",
        description="calls run code that only prints what is written in it",
        advice="Look whether a reward pays for calling a tool as such; pay for answers that use what a tool said.",
    )


def duplicate_calls(table: Table, series: Series) -> DetectorFinding | None:
    """Calls equal to an earlier one of the same episode, as a share of all calls."""
    rows = Rows.of(table, "train")
    return _per_call(
        rows,
        column="duplicate_calls",
        levels=(DUPLICATE_WATCH, DUPLICATE_ALARM),
        title="Repeated calls",
        description="calls repeat an earlier one of their episode, name and arguments",
        advice="Look whether replies are cut before the part that matters, or whether a reward counts calls.",
    )


def _per_call(
    rows: Rows, *, column: str, levels: tuple[float, float], title: str, description: str, advice: str
) -> DetectorFinding | None:
    calls = rows.number("calls")
    if not calls.sum():
        return None
    window = windows(rows)
    late = window.late(rows)
    share = CountShare(float(rows.number(column)[late].sum()), float(calls[late].sum()))
    steps = window.late_steps(rows.steps)
    text = f"{share} {description} in {span(steps)}."
    severity = graded(share.value, *levels) if share.of >= FEWEST_CALLS else Severity.OK
    if severity is Severity.OK:
        return DetectorFinding(column, severity, title, text)
    listed = expression(f"{column} > 0", steps=steps)
    metrics = ("tool_call_counts/mean", "critic/score/mean")
    return DetectorFinding(
        column, severity, title, text, advice, steps, listed, "train", metrics, matches(rows, listed)
    )


def malformed_calls(table: Table, series: Series) -> DetectorFinding | None:
    """A growing share of episodes with a call that could not be read."""
    rows = Rows.of(table, "train")
    if not rows.number("calls").sum():
        return None
    return _growing(
        rows,
        rows.number("malformed") > 0,
        id="malformed_calls",
        levels=(MALFORMED_WATCH, MALFORMED_ALARM),
        title="Malformed calls",
        description="episodes with a call that could not be read",
        advice="Read what the policy writes instead of a call; it may have found that a broken call ends its turn.",
        condition="malformed > 0",
        metrics=("tool_calls/malformed", "stop_reasons/malformed_call_budget"),
    )


def truncation(table: Table, series: Series) -> DetectorFinding | None:
    """A growing share of episodes that were cut off."""
    rows = Rows.of(table, "train")
    if not len(rows):
        return None
    return _growing(
        rows,
        rows.number("truncated") == 1,
        id="truncation",
        levels=(TRUNCATED_WATCH, TRUNCATED_ALARM),
        title="Truncated episodes",
        description="episodes cut off by a token or context limit",
        advice="Give turns more tokens, or look for text that does not end; a cut answer is scored as a wrong one.",
        condition="truncated == true",
        metrics=("response_length/clip_ratio", "response_length/mean"),
    )


def _growing(
    rows: Rows,
    hits: Bools,
    *,
    id: str,
    levels: tuple[float, float],
    title: str,
    description: str,
    advice: str,
    condition: str,
    metrics: tuple[str, ...],
) -> DetectorFinding:
    window = windows(rows)
    early, late = (CountShare.within(hits, where) for where in (window.early(rows), window.late(rows)))
    steps = window.late_steps(rows.steps)
    text = f"{description[0].upper()}{description[1:]}: {early} at first, {late} in {span(steps)}."
    severity = graded(rise(early, late), *levels)
    if severity is Severity.OK:
        return DetectorFinding(id, severity, title, text, metrics=metrics)
    listed = expression(condition, steps=steps)
    return DetectorFinding(id, severity, title, text, advice, steps, listed, "train", metrics, matches(rows, listed))


def length_drift(table: Table, series: Series) -> DetectorFinding | None:
    """Episodes that grow or shrink, and whether the reward came along."""
    rows = Rows.of(table, "train")
    window = windows(rows)
    early, late = window.early(rows), window.late(rows)
    tokens = rows.number("policy_tokens")
    gain = Gain.between(tokens, early, late)
    if gain is None or gain.early <= 0:
        return None
    ratio, paid = gain.late / gain.early, _paid(rows, early, late)
    steps = window.late_steps(rows.steps)
    text = f"The policy wrote {plain(gain.early)} tokens an episode at first and {plain(gain.late)} in {span(steps)}"
    title, metrics = "Length of episodes", ("response_length/mean", "critic/score/mean")
    longer = graded(ratio, LONGER_WATCH, LONGER_ALARM)
    shorter = graded(1 / ratio if ratio else np.inf, 1 / SHORTER_WATCH, 1 / SHORTER_ALARM)
    severity = longer if ratio > 1 else shorter
    if severity is Severity.OK or not gain.certain:
        return DetectorFinding("length_drift", Severity.OK, title, f"{text}.", metrics=metrics)
    if paid:
        severity = Severity.WATCH  # growing with the reward is what learning to reason looks like
    edge = plain(float(np.quantile(tokens[early], 0.9 if ratio > 1 else 0.1)))
    listed = expression(f"policy_tokens {'>' if ratio > 1 else '<'} {edge}", steps=steps)
    with_it = "; the reward rose with it." if paid else "; the reward did not rise with it."
    advice = (
        "Look for padding and repetition; bound or price the length if it buys nothing."
        if ratio > 1
        else "Look whether reasoning or tool calls were dropped, and whether short answers are scored too kindly."
    )
    return DetectorFinding(
        "length_drift", severity, title, text + with_it, advice, steps, listed, "train", metrics, matches(rows, listed)
    )


def _paid(rows: Rows, early: Bools, late: Bools) -> bool:
    reward = Gain.between(rows.number("reward"), early, late)
    return reward is not None and reward.certain and reward.deviations >= PAID


def infrastructure(table: Table, series: Series) -> DetectorFinding | None:
    """Episodes that failed for want of infrastructure, and the most frequent reason."""
    rows = Rows.of(table, "train")
    if not len(rows):
        return None
    window = windows(rows)
    failed = rows.codes("failure") >= 0
    late = CountShare.within(failed, window.late(rows))
    steps = window.late_steps(rows.steps)
    title, metrics = "Infrastructure failures", ("trajectories/failed", "scoring/failure_rate")
    text = f"{CountShare(float(failed.sum()), len(rows))} episodes failed in all; {late} in {span(steps)}."
    severity = graded(late.value, FAILED_WATCH, FAILED_ALARM)
    if severity is Severity.OK:
        return DetectorFinding("infrastructure", severity, title, text, metrics=metrics)
    reason = rows.text("failure", rows.different("failure", failed & window.late(rows))[0])
    listed = expression("failure != null", steps=steps)
    return DetectorFinding(
        "infrastructure",
        severity,
        title,
        f"{text} Most often: {reason[:200]}",
        "Fix this first: failed episodes are left out, so the policy learns from what happened to survive.",
        steps,
        listed,
        "train",
        metrics,
        matches(rows, listed),
    )


def tool_use_vanishing(table: Table, series: Series) -> DetectorFinding | None:
    """Episodes that no longer call a tool though they did."""
    rows = Rows.of(table, "train")
    called = rows.number("called") == 1
    if not called.any():
        return None
    window = windows(rows)
    early, late = (CountShare.within(called, where) for where in (window.early(rows), window.late(rows)))
    steps = window.late_steps(rows.steps)
    title, metrics = "Use of tools", ("tool_call_counts/mean", "num_turns/mean")
    text = f"Episodes that called a tool: {early} at first, {late} in {span(steps)}."
    left = late.value / early.value if early.value else 1.0
    if early.value < USED_BEFORE or left > VANISHED_WATCH or not rise(late, early):
        return DetectorFinding("tool_use_vanishing", Severity.OK, title, text, metrics=metrics)
    paid = _paid(rows, window.early(rows), window.late(rows))
    severity = Severity.ALARM if left <= VANISHED_ALARM and not paid else Severity.WATCH
    listed = expression("calls == 0", steps=steps)
    return DetectorFinding(
        "tool_use_vanishing",
        severity,
        title,
        f"{text} That is {percent(left)} of what it was; the reward {'rose' if paid else 'did not rise'} meanwhile.",
        "See whether calls fail or cost reward (turns, time, format), so that answering at once is the safer way.",
        steps,
        listed,
        "train",
        metrics,
        matches(rows, listed),
    )
