"""Knobs of the reward: which scorers, and how they are run."""

from dataclasses import dataclass
from typing import Any, ClassVar

from turnwise.config.choices import (
    ScoringRun,
)
from turnwise.config.knobs import (
    any_number,
    at_least,
    duration,
    harmless,
    knob,
    only,
    path,
    reaches,
    share,
    url,
)
from turnwise.config.marks import changes_work, key_in


@dataclass
class ScoringConfig:
    """How trajectories are scored: which scorers, with which options, and how they are run."""

    EVERY_KNOB: ClassVar = (changes_work(),)

    scorers: dict[str, str] = knob({}, path(), reaches("code", None))
    """Scorer by data source: a built-in name or module:function; the key "default" serves all others. Set it to reward
    with your own function."""
    options: dict[str, Any] = knob({}, reaches("network", None), key_in(option="api_key_env"))
    """Options by scorer, such as {gsm8k: {wrong: -0.1}}. Set those of the scorer in use; others are refused."""
    weights: dict[str, float] = knob({}, harmless())
    """Weight by part: the reward is then the weighted sum of the parts; those not named count fully. Set it when a
    scorer returns several parts that should count differently."""
    run: ScoringRun = ScoringRun.inline
    """How scorers are run; the scores are the same. Take `pool` for slow or unreliable ones, `http` for a server."""
    workers: int = knob(0, at_least(0, 4096), only("scoring.run", "pool", "http"))
    """Processes of the pool, or requests under way; 0 takes the number of cores, and 32 requests. Raise it when scoring
    is what a step waits for."""
    timeout: float = knob(30.0, duration())
    """Seconds for one trajectory (for a whole batch with `batch`). Raise it for slow judges and test suites. With
    `inline` it is twenty times as long, since waiting for a sandbox or a judge counts; blocking code is not stopped."""
    retries: int = knob(3, at_least(0), only("scoring.run", "pool", "http", "batch"))
    """How often scoring that failed for lack of an answer is tried again. Lower it to see failures at once."""
    agent_error: float | None = knob(0.0, any_number())
    """Reward of an episode whose agent raised because of what the policy wrote, such as a tool that is not there; its
    parts are 0. Lower it to punish that; null keeps the score (docs/ext/sdk_agents.md)."""
    url: str | None = knob(
        None, url(), only("scoring.run", "http"), reaches("network"), key_in("TURNWISE_REWARD_TOKEN")
    )
    """The reward server's address, such as http://127.0.0.1:8200. Its token is the value of the environment variable
    TURNWISE_REWARD_TOKEN. Must be set with scoring.run=http."""
    batch_size: int = knob(64, at_least(1), only("scoring.run", "batch"))
    """Most trajectories given to a batch scorer in one call. Set it to what your function can take at once."""
    max_failures: float = knob(0.2, share())
    """Share of a step's trajectories whose scoring may fail; above it the run stops. Raise it for a judge that is often
    unreachable: such trajectories get no reward and are not trained on."""
