"""Detectors that read what rewards say: about answers, about groups of siblings, about feedback."""

import math
from dataclasses import dataclass

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
    span,
)
from turnwise.ext.board.series import Series
from turnwise.ext.board.steps import Bools, Curve, Floats, Ints, Rows, windows
from turnwise.ext.board.table import Table

ROSE = 0.3
"""Deviations of the reward. Smaller gains are hard to tell from easier samples."""
FELL_WATCH, FELL_ALARM = 0.5, 1.0
"""Deviations of the reward below its best stretch. A solved task that wavers stays below a third."""
FLAT = 0.02
"""Accuracy: a gain of at most two points is none."""
ROOM = 0.95
"""Accuracy at first; above it there is nothing left to gain."""
SURELY = 0.1
"""Accuracy: an alarm only if even the kind end of the error bar is below this gain."""
EVALUATIONS = 3
"""Fewer have no trend."""
UNKNOWN_NOISE = 0.04
"""Of an accuracy over 150 episodes; for evaluations whose trajectories were not kept."""
SELDOM_RIGHT = 0.05
"""Without a part `acc`, right means a reward of at least 1. If hardly any is, the scale is another one."""
WRONG_WATCH, WRONG_ALARM = 0.5, 0.85
"""Of the groups: all siblings equally wrong, nothing to learn from. Hard data begin above a half."""
EASY_WATCH = 0.85
"""Of the groups: all siblings equally right. The run is done, or its data are too easy; never an alarm."""
SAME_WATCH, SAME_ALARM = 0.9, 0.98
"""Of the groups: siblings that are one episode several times. A policy near certainty comes to about a half."""
SAME_WRONG_WATCH, SAME_WRONG_ALARM = 0.2, 0.5
"""Of the groups, and wrong: certainty about wrong answers is rare in a sound run (below one in fifty)."""
FEWEST_GROUPS, FEWEST_SIBLINGS = 8, 3
HURT_WATCH, HURT_ALARM = 0.02, 0.05
"""Of the episodes: more answers turned wrong by the user's words than turned right."""
HURT_SURE_WATCH, HURT_SURE_ALARM = 2.0, 3.0
"""Deviations of that difference if feedback did nothing (a sign test)."""
FEWEST_FLIPPED = 30
_LONGEST_LIST = 1500
_MOST_LISTED = 40
"""Characters, and groups: what a filter can hold."""


def reward_fell(table: Table, series: Series) -> DetectorFinding | None:
    """The reward was better before: what was learned is being lost."""
    rows = Rows.of(table, "train")
    window, reward = windows(rows), rows.number("reward")
    before = len(rows.steps) - 2 * window.length + 1  # where a stretch can begin that ends before the last one
    if before < 1:
        return None
    each = rows.means(reward)
    if not np.isfinite(each).any():
        return None
    each = np.where(np.isfinite(each), each, np.nanmin(each))  # a step that nothing scored is never the best
    stretches = np.convolve(each, np.ones(window.length), "valid")[:before]
    best = int(stretches.argmax())
    gain = Gain.between(reward, (rows.at >= best) & (rows.at < best + window.length), window.late(rows))
    if gain is None:
        return None
    then = int(rows.steps[best]), int(rows.steps[best + window.length - 1])
    steps = window.late_steps(rows.steps)
    text = f"The reward was {plain(gain.early)} at its best ({span(then)}) and {plain(gain.late)} in {span(steps)}."
    title, metrics = "Reward against its best", ("critic/score/mean", "val/accuracy")
    severity = graded(-gain.deviations, FELL_WATCH, FELL_ALARM) if gain.certain else Severity.OK
    if severity is Severity.OK:
        return DetectorFinding("reward_fell", Severity.OK, title, text, metrics=metrics)
    listed = expression(f"reward < {plain(gain.early)}", steps=steps)
    advice = "Go back to a checkpoint of the best steps, and lower the learning rate or the age of episodes (max_lag)."
    count = matches(rows, listed)
    return DetectorFinding("reward_fell", severity, title, text, advice, steps, listed, "train", metrics, count)


@dataclass(frozen=True, slots=True)
class _Accuracy:
    where: str
    early: float
    late: float
    noise: float


def reward_without_accuracy(table: Table, series: Series) -> DetectorFinding | None:
    """The reward rises while the answers get no better: something else is being paid."""
    rows = Rows.of(table, "train")
    window = windows(rows)
    early, late = window.early(rows), window.late(rows)
    reward = rows.number("reward")
    gain, accuracy = Gain.between(reward, early, late), _accuracy(table, series, rows)
    if gain is None or accuracy is None:
        return None
    steps = window.late_steps(rows.steps)
    better = accuracy.late - accuracy.early
    text = (
        f"The reward went from {plain(gain.early)} to {plain(gain.late)} ({span(steps)}), accuracy in "
        f"{accuracy.where} from {percent(accuracy.early)} to {percent(accuracy.late)}."
    )
    title, metrics = "Reward against accuracy", ("critic/score/mean", "val/accuracy", "train/accuracy/*")
    rose = gain.certain and gain.deviations >= ROSE
    if not rose or better > FLAT or accuracy.early >= ROOM:
        return DetectorFinding("reward_without_accuracy", Severity.OK, title, text, metrics=metrics)
    severity = Severity.ALARM if better + 2 * accuracy.noise < SURELY else Severity.WATCH
    above = f"reward > {plain(gain.early)}"
    wrong = expression(above, "right == false", steps=steps)
    listed = wrong if matches(rows, wrong) else expression(above, steps=steps)
    advice = (
        "Read the trajectories that are rewarded and wrong, and find the part that pays them."
        if listed == wrong
        else "What is rewarded is right, so training answers improved and evaluations did not: think of overfitting, "
        "or of evaluations under other conditions."
    )
    return DetectorFinding(
        "reward_without_accuracy",
        severity,
        title,
        text,
        advice,
        steps,
        listed,
        "train",
        metrics,
        matches(rows, listed),
    )


def _accuracy(table: Table, series: Series, rows: Rows) -> _Accuracy | None:
    """By evaluations if there are enough of them, else by the training answers."""
    curve = Curve.of(series, "val/accuracy").finite()
    if len(curve) >= EVALUATIONS:
        third = math.ceil(len(curve) / 3)
        evaluated = Rows.of(table, "eval")
        each = len(evaluated) / len(evaluated.steps) if len(evaluated.steps) else 0.0
        noise = math.sqrt(0.25 / each) if each else UNKNOWN_NOISE
        ends = float(curve.values[:third].mean()), float(curve.values[-third:].mean())
        return _Accuracy("evaluations", *ends, noise * math.sqrt(2 / third))
    right = rows.number("right")
    finite = np.isfinite(right)
    if not finite.any() or ("acc" not in rows.snapshot.part_names and right[finite].mean() < SELDOM_RIGHT):
        return None
    window = windows(rows)
    early, late = (CountShare.within(right == 1, finite & where) for where in (window.early(rows), window.late(rows)))
    if not early.of or not late.of:
        return None
    noise = math.sqrt(0.25 / early.of + 0.25 / late.of)
    return _Accuracy("training", early.value, late.value, noise)


def equal_groups(table: Table, series: Series) -> DetectorFinding | None:
    """Groups whose siblings all got the same reward, and whether they are right or wrong."""
    rows = Rows.of(table, "train")
    deviation, size = rows.grouped("group_std"), rows.grouped("group_size")
    window = windows(rows)
    real = (size > 1) & np.isfinite(deviation)
    late = window.late(rows) & real
    if not late.any():
        return None
    weight = 1 / np.maximum(size, 1)  # each group counts once
    groups = float(weight[late].sum())
    flat, right = late & (deviation == 0), rows.number("right")
    solved, failed = (CountShare(round(float(weight[flat & (right == side)].sum()), 6), groups) for side in (1, 0))
    steps = window.late_steps(rows.steps)
    equal = CountShare(round(float(weight[flat].sum()), 6), groups)
    text = (
        f"{equal} groups gave all siblings one reward in {span(steps)}: "
        f"{percent(solved.value)} all right, {percent(failed.value)} all wrong."
    )
    title, metrics = "Groups without a difference", ("groups/flat", "critic/score/mean")
    easy = Severity.WATCH if solved.value >= EASY_WATCH else Severity.OK
    hard = graded(equal.value - solved.value, WRONG_WATCH, WRONG_ALARM)
    severity = easy if hard is Severity.OK else hard
    if severity is Severity.OK or groups < FEWEST_GROUPS:
        return DetectorFinding("equal_groups", Severity.OK, title, text, metrics=metrics)
    side = "right == true" if hard is Severity.OK else "" if failed.value < equal.value / 2 else "right == false"
    listed = expression("group_std == 0", "group_size > 1", side, steps=steps)
    advice = (
        "The task is nearly solved: harder samples, or stop here."
        if hard is Severity.OK
        else "These groups have no gradient. Easier samples, more siblings, a warm start, or a reward with degrees."
    )
    return DetectorFinding(
        "equal_groups", severity, title, text, advice, steps, listed, "train", metrics, matches(rows, listed)
    )


def identical_siblings(table: Table, series: Series) -> DetectorFinding | None:
    """Groups whose siblings are the same episode over and over: sampling without chance."""
    rows = Rows.of(table, "train")
    window = windows(rows)
    chosen = window.late(rows) & (rows.codes("failure") < 0)
    same, first = _identical(rows, chosen)
    groups = len(same)
    if groups < FEWEST_GROUPS:
        return None
    wrong = same & (rows.number("right")[first] == 0)
    all_of, wrong_of = CountShare(float(same.sum()), groups), CountShare(float(wrong.sum()), groups)
    steps = window.late_steps(rows.steps)
    text = (
        f"In {all_of} groups of {span(steps)} every sibling gave the same answer in as many tokens, turns and calls; "
        f"{percent(wrong_of.value)} of the groups are the same and wrong."
    )
    title, metrics = "Siblings that are all alike", ("actor/entropy", "groups/flat")
    certain = graded(wrong_of.value, SAME_WRONG_WATCH, SAME_WRONG_ALARM)
    alike = graded(all_of.value, SAME_WATCH, SAME_ALARM)
    if alike is Severity.ALARM and wrong_of.value == 0:
        alike = Severity.WATCH  # a solved task looks like this too
    severity = Severity.ALARM if Severity.ALARM in (certain, alike) else Severity.WATCH
    if certain is alike is Severity.OK:
        return DetectorFinding("identical_siblings", Severity.OK, title, text, metrics=metrics)
    listed, count = _list_groups(rows, first[wrong if certain is not Severity.OK else same])
    return DetectorFinding(
        "identical_siblings",
        severity,
        title,
        f"{text} Listed are the newest {count}." if count < all_of.hits else text,
        "Check the temperature, and that siblings draw different noise; a policy sure of wrong answers needs entropy.",
        steps,
        listed,
        "train",
        metrics,
        matches(rows, listed),
    )


def _identical(rows: Rows, chosen: Bools) -> tuple[Bools, Ints]:
    """For each group among the chosen rows: whether its siblings are alike, and its first row."""
    here = np.flatnonzero(chosen)
    shard = rows.snapshot.shard_index[rows.rows[here]].astype(np.int64)
    sample = rows.codes("sample_id")[here]
    order = np.lexsort((sample, shard))
    here, shard, sample = here[order], shard[order], sample[order]
    begins = np.flatnonzero(np.concatenate([np.ones(min(len(here), 1), bool), (np.diff(shard) | np.diff(sample)) != 0]))
    sizes = np.diff(np.append(begins, len(here)))
    same = np.ones(len(begins), dtype=bool)
    for values in (rows.codes("answer"), *(rows.number(name) for name in ("policy_tokens", "turns", "calls"))):
        if len(begins):
            same &= np.minimum.reduceat(values[here], begins) == np.maximum.reduceat(values[here], begins)
    enough = sizes >= FEWEST_SIBLINGS
    return same[enough], here[begins[enough]]


def _list_groups(rows: Rows, first: Ints) -> tuple[str, int]:
    """A filter for as many of the newest groups as it can hold, and how many those are."""
    steps = rows.steps[rows.at[first]]
    parts: list[str] = []
    for row, step in zip(first[::-1].tolist(), steps[::-1].tolist(), strict=True):
        sample = rows.text("sample_id", int(rows.codes("sample_id")[row]))
        part = f"(step == {step} and sample_id == {sample!a})"
        if parts and (sum(map(len, parts)) + len(part) > _LONGEST_LIST or len(parts) >= _MOST_LISTED):
            break
        parts.append(part)
    return expression(f"({' or '.join(parts)})"), len(parts)


def feedback_hurts(table: Table, series: Series) -> DetectorFinding | None:
    """First answers that are better than the final ones: what the user says turns right answers wrong."""
    rows = Rows.of(table, "eval")
    first, final = rows.number("first_right"), rows.number("right")
    both = np.isfinite(first) & np.isfinite(final)
    evaluations = np.unique(rows.at[both])
    if not len(evaluations):
        return None
    recent = evaluations[-math.ceil(len(evaluations) / 3) :]
    here = both & np.isin(rows.at, recent)
    steps = int(rows.steps[recent[0]]), int(rows.steps[recent[-1]])
    worse, better = (_count(here & (first == side) & (final == 1 - side)) for side in (1, 0))
    episodes = _count(here)
    text = (
        f"In evaluations of {span(steps)} the user's words turned {worse:.0f} of {episodes:.0f} answers from right to "
        f"wrong and {better:.0f} from wrong to right."
    )
    title, metrics = "First answers against final ones", ("val/accuracy", "val/first_accuracy/*")
    lost = (worse - better) / episodes
    sure = (worse - better) / math.sqrt(worse + better) if worse + better else 0.0
    severity = min(
        (graded(lost, HURT_WATCH, HURT_ALARM), graded(sure, HURT_SURE_WATCH, HURT_SURE_ALARM)), key=_LEVELS.index
    )
    if severity is Severity.OK or episodes < FEWEST_FLIPPED:
        return DetectorFinding("feedback_hurts", Severity.OK, title, text, split="eval", metrics=metrics)
    listed = expression("first_right == true", "right == false", split="eval", steps=steps)
    return DetectorFinding(
        "feedback_hurts",
        severity,
        title,
        text,
        "Read what the user says to right answers: it may sound like doubt, or ask again for what was already given.",
        steps,
        listed,
        "eval",
        metrics,
        matches(rows, listed),
    )


_LEVELS = [Severity.OK, Severity.WATCH, Severity.ALARM]


def _count(hits: Bools | Floats) -> float:
    return float(hits.sum())
