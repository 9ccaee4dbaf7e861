"""Detectors that read the learner's own numbers: entropy, KL, gradients, the gap to the sampler."""

from collections.abc import Callable

import numpy as np

from turnwise.ext.board.findings import DetectorFinding, Severity, expression, graded, matches, plain, span
from turnwise.ext.board.series import Series
from turnwise.ext.board.steps import Curve, Floats, Rows
from turnwise.ext.board.table import Table

ENTROPY, GAP, GRADIENTS = "actor/entropy", "rollout_corr/abs_diff_mean", ("actor/grad_norm", "critic/grad_norm")
COLLAPSED_WATCH, COLLAPSED_ALARM = 0.25, 0.1
"""What is left of the first entropy. A task that is learned halves it; a tenth means that nothing is explored."""
EXPLODED_WATCH, EXPLODED_ALARM = 2.5, 5.0
"""Times the first entropy."""
EXPLODED_FROM = 0.1
"""Nats a token: below it even a many times larger entropy is a nearly certain policy."""
GAP_GREW = 3.0
GAP_WATCH, GAP_ALARM = 0.02, 0.1
"""Mean |learner - sampler| log-prob. Half precision alone makes up to 0.01; 0.1 is a ratio off by a tenth."""
KL_GREW = 4.0
"""Times the median of the run's first half."""
UPDATE_KL_WATCH, UPDATE_KL_ALARM = 0.05, 0.2
"""`actor/ppo_kl`: within one step. PPO is commonly stopped at 0.01 to 0.03; a clipped update seldom passes 0.05."""
REFERENCE_KL_WATCH, REFERENCE_KL_ALARM = 0.5, 2.0
"""To the reference, a token: a steady 0.1 is a policy that learned, 2 nats one that writes another language."""
SPIKE = 10.0
"""Times the median of the steps before. Gradients of a sound run vary by up to five."""
BEFORE, FEWEST_BEFORE = 20, 5
"""Steps before a spike that are its measure, and how many there must be."""
SPIKES_ALARM = 3
"""In the last stretch; one spike may be one odd batch."""
MOST_STEPS_NAMED = 20
LOSSES = ("loss", "actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/ppo_kl", "critic/vf_loss")


def _curve(series: Series, name: str, rows: Rows, column: str | None = None) -> Curve:
    """A metric; where the run has none, the mean of a column of its trajectories."""
    curve = Curve.of(series, name).finite()
    if len(curve) or column is None or not len(rows):
        return curve
    return Curve(rows.steps, rows.means(rows.number(column))).finite()


def _worst(
    curve: Curve, late: float, grade: Callable[[float], Severity], *, lowest: bool = False
) -> tuple[Severity, float, tuple[int, int], str]:
    """How bad the last stretch is, or else the worst one: severity, median, steps, and what to say of the end.

    What passed is to be watched at most.
    """
    now = grade(late)
    value, steps = curve.extreme(lowest=lowest)
    if now is not Severity.OK or grade(value) is Severity.OK:
        return now, late, curve.late_steps(), ""
    return Severity.WATCH, value, steps, f" It is {plain(late)} in {span(curve.late_steps())}."


def _of_steps(curve: Curve, rows: Rows, steps: tuple[int, int], condition: str = "") -> tuple[str, int]:
    """A filter for the trajectories of a metric's steps, and how many those are."""
    listed = expression(condition, steps=steps)
    return listed, matches(rows, listed)


def entropy_collapse(table: Table, series: Series) -> DetectorFinding | None:
    """The policy no longer tries anything."""
    return _entropy(table, series, collapse=True)


def entropy_explosion(table: Table, series: Series) -> DetectorFinding | None:
    """The policy dissolves into noise."""
    return _entropy(table, series, collapse=False)


def _entropy(table: Table, series: Series, *, collapse: bool) -> DetectorFinding | None:
    rows = Rows.of(table, "train")
    curve = _curve(series, ENTROPY, rows, "entropy")
    if not len(curve):
        return None
    early, late = curve.ends()
    if early <= 0:
        return None
    id = "entropy_collapse" if collapse else "entropy_explosion"
    title = "Entropy collapse" if collapse else "Entropy explosion"
    if collapse:
        severity, worst, steps, now = _worst(
            curve,
            late,
            lambda value: graded(early / value if value > 0 else np.inf, 1 / COLLAPSED_WATCH, 1 / COLLAPSED_ALARM),
            lowest=True,
        )
        edge, sign = early * COLLAPSED_WATCH, "<"
        advice = "Raise the temperature or the entropy bonus, lower the learning rate, or loosen the upper clip."
    else:
        severity, worst, steps, now = _worst(
            curve,
            late,
            lambda value: graded(value / early if value >= EXPLODED_FROM else 0.0, EXPLODED_WATCH, EXPLODED_ALARM),
        )
        edge, sign = early * EXPLODED_WATCH, ">"
        advice = "Lower the learning rate or the entropy bonus, and look whether rewards have turned into noise."
    text = f"The median entropy was {plain(early)} nats a token at first and {plain(worst)} in {span(steps)}.{now}"
    if severity is Severity.OK:
        return DetectorFinding(id, severity, title, text, metrics=(ENTROPY,))
    recorded = bool(np.isfinite(rows.number("entropy")).any())
    listed, count = _of_steps(curve, rows, steps, f"entropy {sign} {plain(edge)}" if recorded else "")
    return DetectorFinding(id, severity, title, text, advice, steps, listed, "train", (ENTROPY,), count)


def sampler_gap(table: Table, series: Series) -> DetectorFinding | None:
    """Sampler and learner disagree more and more about the same tokens."""
    rows = Rows.of(table, "train")
    curve = _curve(series, GAP, rows, "gap")
    if not len(curve):
        return None
    early, late = curve.ends()
    severity, worst, steps, now = _worst(
        curve, late, lambda value: graded(value, GAP_WATCH, GAP_ALARM) if value >= GAP_GREW * early else Severity.OK
    )
    title = "Sampler against learner"
    text = (
        f"Their log-probs differed by {plain(early)} on average at first and by {plain(worst)} in {span(steps)}.{now}"
    )
    metrics = (GAP, "rollout_corr/k3_kl", "rollout_corr/abs_diff_max")
    if severity is Severity.OK:
        return DetectorFinding("sampler_gap", severity, title, text, metrics=metrics)
    recorded = bool(np.isfinite(rows.number("gap")).any())
    listed, count = _of_steps(curve, rows, steps, f"gap > {plain(GAP_WATCH)}" if recorded else "")
    advice = "Check that new weights reach the sampler and in which precision it runs; correct by importance weights."
    return DetectorFinding("sampler_gap", severity, title, text, advice, steps, listed, "train", metrics, count)


def kl_blow_up(table: Table, series: Series) -> DetectorFinding | None:
    """The policy leaves the one it was updated from, or the reference, ever faster; the worst of these metrics."""
    rows = Rows.of(table, "train")
    names = [name for name in series.names() if name.startswith("actor/") and "kl" in name and "coef" not in name]
    findings = [finding for name in names if (finding := _kl(series, name, rows)) is not None]
    order = [Severity.ALARM, Severity.WATCH, Severity.OK]
    return min(findings, key=lambda finding: order.index(finding.severity), default=None)


def _kl(series: Series, name: str, rows: Rows) -> DetectorFinding | None:
    curve = Curve.of(series, name).finite()
    if not len(curve):
        return None
    curve = Curve(curve.steps, np.abs(curve.values))
    early, late = curve.ends()
    update = name == "actor/ppo_kl"
    before = float(np.median(curve.values[: max(len(curve) // 2, 1)])) if update else early
    levels = (UPDATE_KL_WATCH, UPDATE_KL_ALARM) if update else (REFERENCE_KL_WATCH, REFERENCE_KL_ALARM)
    title = "KL to the policy before the update" if update else "KL to the reference"
    when = "in the first half of the run" if update else "at first"
    severity, worst, steps, now = _worst(
        curve, late, lambda value: graded(value, *levels) if value >= KL_GREW * before else Severity.OK
    )
    text = f"The median of {name} was {plain(before)} {when} and {plain(worst)} in {span(steps)}.{now}"
    if severity is Severity.OK:
        return DetectorFinding("kl_blow_up", severity, title, text, metrics=(name,))
    listed, count = _of_steps(curve, rows, steps)
    advice = "Lower the learning rate or the updates a step, or raise the KL coefficient; go back to a checkpoint."
    return DetectorFinding("kl_blow_up", severity, title, text, advice, steps, listed, "train", (name,), count)


def gradient_spikes(table: Table, series: Series) -> DetectorFinding | None:
    """Steps whose gradient is many times those before it."""
    rows = Rows.of(table, "train")
    curves = [(name, curve) for name in GRADIENTS if len(curve := Curve.of(series, name).finite())]
    if not curves:
        return None
    name, curve = max(curves, key=lambda entry: int(_spikes(entry[1].values).sum()))
    at = np.flatnonzero(_spikes(curve.values))
    metrics = tuple(name for name, _ in curves)
    if not len(at):
        text = f"No gradient was {SPIKE:.0f} times the median of the {BEFORE} steps before it."
        return DetectorFinding("gradient_spikes", Severity.OK, "Gradient spikes", text, metrics=metrics)
    worst = int(at[np.argmax(curve.values[at])])
    where = curve.steps[at].tolist()
    late = int((curve.steps[at] >= curve.late_steps()[0]).sum())
    severity = Severity.ALARM if late >= SPIKES_ALARM else Severity.WATCH
    named = where[-MOST_STEPS_NAMED:]
    text = (
        f"{name} was over {SPIKE:.0f} times the median of the steps before it {len(at)} time(s), {late} of them in the "
        f"last stretch; the largest was {plain(float(curve.values[worst]))} at step {int(curve.steps[worst])}."
    )
    if len(named) < len(where):
        text += f" Listed are the newest {len(named)} steps."
    listed = expression(f"step in ({', '.join(map(str, named))},)")
    advice = "Read those batches (odd lengths, huge advantages), clip the gradient, or lower the learning rate."
    steps = (where[0], where[-1])
    count = matches(rows, listed)
    return DetectorFinding(
        "gradient_spikes", severity, "Gradient spikes", text, advice, steps, listed, "train", metrics, count
    )


def _spikes(values: Floats) -> "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]":
    padded = np.concatenate([np.full(BEFORE, np.nan), values[:-1]])
    before = np.lib.stride_tricks.sliding_window_view(padded, BEFORE)
    spiked = np.zeros(len(values), dtype=bool)
    ready = np.arange(len(values)) >= FEWEST_BEFORE
    if ready.any():
        usual = np.nanmedian(before[ready], axis=1)
        spiked[ready] = (values[ready] > SPIKE * usual) & (usual > 0)
    return spiked


def not_finite(table: Table, series: Series) -> DetectorFinding | None:
    """Steps at which the loss or what it is made of is no number."""
    rows = Rows.of(table, "train")
    curves = [(name, curve) for name in LOSSES if len(curve := Curve.of(series, name))]
    if not curves:
        return None
    title, metrics = "Values that are not finite", tuple(name for name, _ in curves)
    bad = [(name, curve, curve.steps[~np.isfinite(curve.values)]) for name, curve in curves]
    bad = [entry for entry in bad if len(entry[2])]
    if not bad:
        text = f"Every value of {', '.join(metrics)} is finite."
        return DetectorFinding("not_finite", Severity.OK, title, text, metrics=metrics)
    name, curve, where = max(bad, key=lambda entry: len(entry[2]))
    steps = int(where[0]), int(where[-1])
    named = where[-MOST_STEPS_NAMED:].tolist()
    text = f"{name} is not finite at {len(where)} of {len(curve)} steps, first at step {steps[0]}, last at {steps[1]}."
    listed = expression(f"step in ({', '.join(map(str, named))},)")
    severity = Severity.ALARM if steps[1] >= curve.late_steps()[0] else Severity.WATCH
    advice = "Go back to the checkpoint before it; look at those batches, the precision, and the learning rate."
    hurt = tuple(entry[0] for entry in bad)
    return DetectorFinding(
        "not_finite", severity, title, text, advice, steps, listed, "train", hurt, matches(rows, listed)
    )
