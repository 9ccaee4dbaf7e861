"""Warnings while training runs: no signal to learn from, tools that do not work, log-probs that differ."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from turnwise.config import Config
from turnwise.reports.evaluation import agent_errors, ignored_requests
from turnwise.reports.training import has_signal
from turnwise.rollout.toolbox.report import tool_reports, warnings
from turnwise.types import Trajectory

WARN_AT = (3, 10, 30, 100, 300, 1000, 3000, 10000)
"""Steps in a row without a signal after which a warning is given: soon, and then ever more rarely."""
MANY_CUT = 0.25
AGENT = "(agent)"
"""Under which an agent that raises is named once; no tool is called so."""


class Alerts:
    """Reads every step; each tool is named once, a missing signal rarely."""

    def __init__(self, config: Config, run: Path) -> None:
        self._config, self._run = config, run
        self._in_a_row = 0
        self._named: set[str] = set()

    def after_step(self, metrics: Mapping[str, float], trajectories: Sequence[Trajectory]) -> list[str]:
        """The warnings that are due now."""
        broken, raised = warnings(tool_reports(trajectories)), agent_errors(trajectories)
        broken |= {} if raised is None else {AGENT: raised}
        due = [f"{text} in this step" for name, text in broken.items() if name not in self._named]
        ignored = ignored_requests(trajectories)
        if ignored is not None and ignored not in self._named:
            due.append(ignored)
            self._named.add(ignored)
        self._named |= broken.keys()
        gap = metrics.get("rollout_corr/abs_diff_mean", 0.0)
        if not gap <= self._config.training.warn_logprob_gap:  # nan too
            age = metrics.get("staleness/mean", 0.0)
            old = f"; tokens are {age:.2g} step(s) old on average" if age else ""
            difference = f"sampler and learner log-probs differ by {gap:.3g} on average"
            due.append(f"{difference} (training.warn_logprob_gap{old})")
        self._in_a_row = 0 if has_signal(metrics) else self._in_a_row + 1
        if self._in_a_row in WARN_AT:
            due.append(f"no learning signal for {self._in_a_row} steps: {self._why(metrics)}")
        return due

    def _why(self, metrics: Mapping[str, float]) -> str:
        hint = f"`turnwise show {self._run}` shows an episode"
        most, least = metrics.get("critic/score/max"), metrics.get("critic/score/min")
        if most is None or least is None:
            dropped = "; training.drop_constant_groups left none" if self._config.training.drop_constant_groups else ""
            return f"no episode could be trained on{dropped}; {hint}"
        if most != least:
            advantages = metrics.get("critic/advantages/max", 0.0), metrics.get("critic/advantages/min", 0.0)
            if any(advantages):
                return "advantages differ and the gradient is still 0; look at algorithm.loss and its clip bounds"
            return (
                "the siblings of every group have the same reward; a larger training.group_size or a higher "
                "sampling.temperature makes them differ, training.drop_constant_groups=true leaves such groups out; "
                f"{hint}"
            )
        if most > 0:
            return (
                f"every episode has the reward {most:g}; if that is the best there is, nothing is left to learn: take "
                f"harder samples; {hint}"
            )
        cut = metrics.get("response_length/clip_ratio", 0.0)
        reasons = [f"{cut:.0%} of the answers are cut off (sampling.max_tokens, rollout.max_tokens)"] * (cut > MANY_CUT)
        reasons += ["the scorer never gives credit", "the task is too hard for the model"]
        return (
            f"every episode has the reward {most:g}. Likely {', or '.join(reasons)}; {hint} with its answer and reward"
        )
