"""The health of a run: every detector asked once, the worst findings first."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from turnwise.ext.board.detectors.bursts import (
    duplicate_burst,
    failure_burst,
    flat_burst,
    length_burst,
    malformed_burst,
    print_only_burst,
    reward_dip,
    tool_error_burst,
    tools_unused_burst,
    truncation_burst,
)
from turnwise.ext.board.detectors.episodes import (
    duplicate_calls,
    infrastructure,
    length_drift,
    malformed_calls,
    print_only,
    tool_use_vanishing,
    truncation,
)
from turnwise.ext.board.detectors.learning import (
    LOSSES,
    entropy_collapse,
    entropy_explosion,
    gradient_spikes,
    kl_blow_up,
    not_finite,
    sampler_gap,
)
from turnwise.ext.board.detectors.reward import (
    equal_groups,
    feedback_hurts,
    identical_siblings,
    reward_fell,
    reward_without_accuracy,
)
from turnwise.ext.board.findings import Detector, DetectorFinding, Severity
from turnwise.ext.board.run_warnings import RunWarning
from turnwise.ext.board.series import Series
from turnwise.ext.board.steps import Rows
from turnwise.ext.board.table import Table

SHORTEST_RUN = 8
"""Steps. Two stretches of four are the least that can be compared."""
FACTS: tuple[Detector, ...] = (infrastructure, not_finite, feedback_hurts)
"""What needs no trend. In a run too short for the others these are still told, as something to watch."""
DETECTORS: tuple[Detector, ...] = (
    reward_fell,
    reward_without_accuracy,
    entropy_collapse,
    entropy_explosion,
    kl_blow_up,
    gradient_spikes,
    sampler_gap,
    equal_groups,
    identical_siblings,
    print_only,
    duplicate_calls,
    malformed_calls,
    tool_use_vanishing,
    length_drift,
    truncation,
    malformed_burst,
    tool_error_burst,
    truncation_burst,
    failure_burst,
    print_only_burst,
    duplicate_burst,
    tools_unused_burst,
    flat_burst,
    reward_dip,
    length_burst,
    *FACTS,
)
_ORDER = [Severity.ALARM, Severity.WATCH, Severity.OK]


def health(table: Table, series: Series, warnings: Sequence[RunWarning] = ()) -> dict[str, Any]:
    """{"findings", "warnings" of the run itself, "pending" files}; findings are of what was read so far."""
    own = [asdict(warning) for warning in warnings]
    made = [finding.as_json() for finding in findings(table, series)]
    return {"findings": made, "warnings": own, "pending": table.pending}


def to_look_at(state: Mapping[str, Any]) -> dict[str, int]:
    """{"alarm", "watch", "pending"} of what `health` says; a warning of the run is something to watch."""
    counts = Counter(finding["severity"] for finding in state["findings"])
    watch = counts[Severity.WATCH.value] + len(state["warnings"])
    return {"alarm": counts[Severity.ALARM.value], "watch": watch, "pending": state["pending"]}


def findings(table: Table, series: Series) -> list[DetectorFinding]:
    """What the detectors have to say, alarms first; before them what there is still to be read."""
    steps = _steps(table, series)
    if steps < SHORTEST_RUN:
        results = [replace(entry, severity=_at_most_watch(entry.severity)) for entry in _ask(FACTS, table, series)]
        results.append(_too_early(steps))
    else:
        results = _ask(DETECTORS, table, series)
    reading = [_reading(table.pending)] if table.pending else []
    return reading + sorted(results, key=lambda finding: _ORDER.index(finding.severity))


def _ask(detectors: tuple[Detector, ...], table: Table, series: Series) -> list[DetectorFinding]:
    findings = [finding for detector in detectors if (finding := detector(table, series)) is not None]
    # A finding about metrics whose trajectories were not kept has nothing to list.
    return [replace(entry, filter=None, count=None) if entry.count == 0 else entry for entry in findings]


def _steps(table: Table, series: Series) -> int:
    metrics = [len(np.unique(series.get(name).step)) for name in ("critic/score/mean", *LOSSES)]
    if len(series.get("sft/loss").step):  # the trajectories of a fine-tuning are what it learned from, not its own
        return max(metrics)
    return max(len(Rows.of(table, "train").steps), *metrics)


def _at_most_watch(severity: Severity) -> Severity:
    return Severity.WATCH if severity is Severity.ALARM else severity


def _reading(pending: int) -> DetectorFinding:
    text = f"{pending} index line(s) and file(s) are not read yet (the oldest come last); this shows only a part."
    return DetectorFinding("reading", Severity.OK, "Still reading", text)


def _too_early(steps: int) -> DetectorFinding:
    text = (
        f"The run has {steps} training step(s); trends are looked for from {SHORTEST_RUN} on."
        if steps
        else "The run has no step of reinforcement learning; there is no trend to look for."
    )
    return DetectorFinding("too_early", Severity.OK, "Too early to tell", text)
