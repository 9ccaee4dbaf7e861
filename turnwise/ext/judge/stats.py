"""What judging cost and how well it went, as numbers."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from turnwise.system.metrics import Metric, Reduction

KEPT_LATENCIES = 10_000
COUNTS = (
    "rule_hits", "unasked", "verdicts", "failed_verdicts", "requests", "failed_requests", "over_budget",
    "unreadable_replies", "cache_hits", "joined", "prompt_tokens", "completion_tokens", "unmetered_replies",
)  # fmt: skip


@dataclass(slots=True)
class JudgeStats:
    """Counts since they were last taken."""

    rule_hits: int = 0
    """Answers that a rule accepted; the judge was not asked."""
    unasked: int = 0
    """Answers missing or too long to be sent; scored 0 without the judge."""
    verdicts: int = 0
    """Verdicts asked for."""
    failed_verdicts: int = 0
    """Of those, without a result."""
    requests: int = 0
    """HTTP requests for a reply or the model's name, each try counted."""
    failed_requests: int = 0
    over_budget: int = 0
    """Requests that were not sent, because the budget was spent."""
    unreadable_replies: int = 0
    """Replies that were none of the allowed verdicts."""
    cache_hits: int = 0
    joined: int = 0
    """Votes that waited for an equal one already under way."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    unmetered_replies: int = 0
    """Replies whose tokens the server did not count; the token sums leave them out."""
    agreements: list[float] = field(default_factory=list)
    """Of verdicts by several votes: the share of votes equal to the verdict."""
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_LATENCIES))
    """Seconds of good requests."""

    def reset(self) -> None:
        """Sets all counters to 0 and forgets latencies and agreements."""
        for name in COUNTS:
            setattr(self, name, 0)
        self.agreements.clear()
        self.latencies.clear()


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def metrics_of(many: Iterable[JudgeStats]) -> list[Metric]:
    """The numbers of several judges together; none when nothing was asked."""
    stats = list(many)
    counts = {name: sum(getattr(judge_stats, name) for judge_stats in stats) for name in COUNTS}
    if not any(counts.values()):
        return []
    metrics = [Metric(f"judge/{name}", value, Reduction.SUM) for name, value in counts.items()]
    if counts["requests"]:
        metrics.append(Metric("judge/error_rate", counts["failed_requests"] / counts["requests"]))
    latencies = [seconds for judge_stats in stats for seconds in judge_stats.latencies]
    if latencies:
        metrics += [Metric(f"judge/latency_p{int(100 * at)}", quantile(latencies, at)) for at in (0.5, 0.95)]
    agreements = [share for judge_stats in stats for share in judge_stats.agreements]
    if agreements:
        metrics.append(Metric("judge/agreement", sum(agreements) / len(agreements)))
    return metrics
