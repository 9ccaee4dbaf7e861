"""A finished episode as verl's AgentLoopOutput: prompt, response, and a mask over exactly the policy's tokens."""

import importlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from turnwise.errors import EpisodeError
from turnwise.rollout.episode import ENGINE_LOST
from turnwise.scoring.scorer import verl_extra_info
from turnwise.training.sequences import to_sequences
from turnwise.types import Ledger, Trajectory

MODULE = "verl.experimental.agent_loop.agent_loop"
ARTIFACT = "turnwise"
"""The extra field with what else is known of the episode."""


@dataclass(slots=True)
class Output:
    """What one sequence of an episode is to verl; the names are its."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None
    """nan where the server gave none."""
    reward_score: float | None
    num_turns: int
    metrics: dict[str, float]
    extra_fields: dict[str, Any] = field(default_factory=dict)

    def as_verl(self) -> Any:
        """verl's own object, of the release that is installed."""
        module = importlib.import_module(MODULE)
        known = module.AgentLoopMetrics.model_fields  # releases differ in what they measure
        metrics = module.AgentLoopMetrics(**{name: one for name, one in self.metrics.items() if name in known})
        return module.AgentLoopOutput(
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            response_mask=self.response_mask,
            response_logprobs=self.response_logprobs,
            multi_modal_data={},
            reward_score=self.reward_score,
            num_turns=self.num_turns,
            metrics=metrics,
            extra_fields=self.extra_fields,
        )


def to_outputs(trajectory: Trajectory, metrics: dict[str, float], *, response_length: int) -> list[Output]:
    """One for each sequence that may be learnt from; EpisodeError for one that verl's batch has no room for."""
    ledgers = [trajectory.segments[one.segment] for one in to_sequences([trajectory])]
    if not ledgers:
        raise EpisodeError(f"the policy wrote nothing: the episode ended with {trajectory.stop_reason.value}")
    found = [_output(ledger, trajectory, metrics) for ledger in ledgers]
    for one in found:
        if len(one.response_ids) > response_length:
            raise EpisodeError(
                f"the response has {len(one.response_ids)} tokens and verl's rollout.response_length is "
                f"{response_length}"
            )
    return found


def masked(trajectory: Trajectory, metrics: dict[str, float], *, end_id: int, limits: tuple[int, int]) -> Output:
    """A failed episode, nothing of which is learnt: what was recorded, as far as verl's batch (`limits`: its prompt
    and response lengths) has room, at least one token long, with a mask of zeros."""
    ledger = trajectory.segments[0] if trajectory.segments else Ledger()
    output = _output(ledger, trajectory, metrics)
    prompt, response = limits
    output.prompt_ids = output.prompt_ids[:prompt] or [end_id]
    output.response_ids = output.response_ids[:response] or [end_id]
    output.response_mask = [0] * len(output.response_ids)
    output.response_logprobs = (output.response_logprobs or [0.0])[:response]
    return output


def _output(ledger: Ledger, trajectory: Trajectory, metrics: dict[str, float]) -> Output:
    """Of one ledger, up to the last token that the policy wrote: what follows nobody answered, and verl stands the
    reward on the last token."""
    ids, mask = ledger.token_ids, ledger.loss_mask
    places = np.flatnonzero(mask)
    first, end = (int(places[0]), int(places[-1]) + 1) if len(places) else (len(ids), len(ids))
    said = verl_extra_info(trajectory)
    return Output(
        prompt_ids=ids[:first].tolist(),
        response_ids=ids[first:end].tolist(),
        response_mask=mask[first:end].astype(int).tolist(),
        response_logprobs=ledger.logprobs[first:end].tolist(),
        reward_score=trajectory.reward,
        num_turns=said["num_turns"],
        metrics=dict(metrics),
        extra_fields={
            "turn_scores": said["turn_scores"],
            "tool_rewards": said["tool_rewards"],
            ARTIFACT: {
                "stop_reason": trajectory.stop_reason.value,
                "failure": trajectory.failure,
                "parts": dict(trajectory.parts),
                ENGINE_LOST: trajectory.artifacts.get(ENGINE_LOST, []),
            },
        },
    )
