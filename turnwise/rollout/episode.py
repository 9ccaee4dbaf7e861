"""One episode: a sample goes in, a finished trajectory comes out, and everything it opened is closed."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from turnwise.config import Config
from turnwise.engines.sampler import NoiseKey
from turnwise.errors import EpisodeError
from turnwise.rollout.conversation import Conversation, EpisodeEnd
from turnwise.rollout.plan import Plan, Route
from turnwise.rollout.speakers import Speaker
from turnwise.rollout.toolbox import EpisodeTools, Toolbox
from turnwise.rollout.users import Interactions, SimulatedUser
from turnwise.types import JsonSchema, Sample, StopReason, Trajectory

AgentLoop = Callable[[Conversation], Awaitable[None]]


class MakeSpeaker(Protocol):
    """Makes the model's side of one conversation."""

    def __call__(self, conversation: str, noise: NoiseKey, tools: list[JsonSchema]) -> Speaker: ...


@dataclass(frozen=True, slots=True)
class Stage:
    """What all episodes of a run share."""

    config: Config
    plan: Plan
    toolbox: Toolbox
    interactions: Interactions
    make_speaker: MakeSpeaker


@dataclass(slots=True)
class _Cast:
    """Who takes part in one episode."""

    speaker: Speaker
    tools: EpisodeTools
    user: SimulatedUser | None
    chat: Conversation


async def run_episode(sample: Sample, *, sibling: int, step: int, stage: Stage) -> Trajectory:
    """Play one episode. Failures of tools' and users' code end up on the trajectory; cancellation passes through."""
    start = time.perf_counter()
    route = stage.plan.route(sample)
    cast = _cast(sample, sibling, step, route, stage)
    reason, failure, score = StopReason.FAILED, None, None
    try:
        try:
            reason = await _play(cast, route.loop, stage.config.rollout.max_seconds)
        finally:
            problems = await asyncio.shield(asyncio.ensure_future(_close(cast)))
        score = problems.score
        if problems.errors:
            raise EpisodeError("; ".join(problems.errors))
    except EpisodeError as error:
        reason, failure = StopReason.FAILED, str(error)
    trajectory = Trajectory(
        sample=sample,
        sibling=sibling,
        step=step,
        messages=cast.chat.messages,
        turns=cast.chat.turns,
        segments=cast.speaker.segments,
        stop_reason=reason,
        seconds=time.perf_counter() - start,
        failure=failure,
    )
    if score is not None:
        trajectory.artifacts["interaction_score"] = score
    if cast.user is not None and cast.user.notes:
        trajectory.artifacts["interaction_notes"] = cast.user.notes
    if cast.chat.turns:
        trajectory.render_check = cast.speaker.check(cast.chat.messages)
    return trajectory


def _cast(sample: Sample, sibling: int, step: int, route: Route, stage: Stage) -> _Cast:
    config = stage.config
    conversation = f"{step}/{sample.id}/{sibling}"
    noise = NoiseKey(config.seed, step, sample.id, sibling)
    speaker = stage.make_speaker(conversation, noise, stage.toolbox.schemas(route.tools))
    tools = stage.toolbox.open(sample, route.tools)
    user = None
    if route.interaction is not None:
        spec = stage.interactions.spec_for(sample)
        if spec is None or spec.name != route.interaction:
            raise ValueError(f"the plan gives {sample.id} the interaction {route.interaction!r}, the sample has {spec}")
        user = SimulatedUser(stage.interactions.get(spec.name), spec, conversation)
    chat = Conversation(sample, speaker, tools, user, config.rollout, config.sampling)
    return _Cast(speaker, tools, user, chat)


async def _play(cast: _Cast, loop: AgentLoop, seconds: float | None) -> StopReason:
    try:
        async with asyncio.timeout(seconds) as deadline:
            if cast.user is not None:
                await cast.user.start()
            try:
                await loop(cast.chat)
                reason = StopReason.ANSWERED
            except EpisodeEnd as end:
                reason = end.reason
            await cast.chat.finish()
            return reason
    except TimeoutError:
        if deadline.expired():
            return StopReason.TIME_BUDGET
        raise


@dataclass(slots=True)
class _Closed:
    score: float | None
    errors: list[str]


async def _close(cast: _Cast) -> _Closed:
    """Close speaker, tools and user, each whatever became of the others."""
    score, errors = None, []
    try:
        if cast.user is not None:
            score = await cast.user.finish()
    except EpisodeError as error:
        errors.append(str(error))
    errors += await cast.tools.close()
    await cast.speaker.close()
    return _Closed(score, errors)
