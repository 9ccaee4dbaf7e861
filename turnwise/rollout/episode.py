"""One episode: a sample goes in, a finished trajectory comes out, and everything it opened is closed."""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Protocol
from uuid import uuid4

from turnwise import waiting
from turnwise.config import Config
from turnwise.engines.sampler import NoiseKey
from turnwise.errors import EpisodeError, TurnwiseError, first_cause, one_line
from turnwise.rollout import strangers
from turnwise.rollout.conversation import Conversation, EpisodeEnd
from turnwise.rollout.plan import Plan, Route
from turnwise.rollout.speakers import Speaker
from turnwise.rollout.toolbox import EpisodeTools, Toolbox
from turnwise.rollout.users import Interactions, SimulatedUser
from turnwise.types import JsonSchema, Sample, StopReason, Trajectory

LAST_WORD_SECONDS = 10.0
"""For the user to judge the last answer of an episode whose time is up."""


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
    reason, failures = StopReason.FAILED, []
    try:
        reason = await _play(cast, route, stage.config.rollout.max_seconds)
    except EpisodeError as error:
        failures = [str(error)]
    finally:
        closed = await strangers.to_the_end(_close(cast, scored=reason is not StopReason.FAILED))
    failures += closed.errors
    trajectory = Trajectory(
        sample=sample,
        sibling=sibling,
        step=step,
        messages=cast.chat.messages,
        turns=cast.chat.turns,
        segments=cast.speaker.segments,
        stop_reason=StopReason.FAILED if failures else reason,
        seconds=time.perf_counter() - start,
        failure="; ".join(failures) or None,
    )
    if closed.score is not None:
        trajectory.artifacts["interaction_score"] = closed.score
    if cast.user is not None and cast.user.notes:
        trajectory.artifacts["interaction_notes"] = cast.user.notes
    if cast.chat.turns:
        check = trajectory.render_check = cast.speaker.check(cast.chat.messages)
        if check is not None and check.problem is not None:
            trajectory.artifacts["render_problem"] = check.problem
    return trajectory


def _cast(sample: Sample, sibling: int, step: int, route: Route, stage: Stage) -> _Cast:
    config = stage.config
    # Unique, though noise is not: a sampler and an interaction keep state under it, and a sample may be played twice.
    conversation = f"{step}/{sample.id}/{sibling}/{uuid4().hex[:12]}"
    noise = NoiseKey(config.seed, step, sample.id, sibling)
    speaker = stage.make_speaker(conversation, noise, stage.toolbox.schemas(route.tools))
    tools = stage.toolbox.open(sample, route.tools, noise.bits())
    user = None
    if route.interaction is not None:
        spec = stage.interactions.spec_for(sample)
        if spec is None or spec.name != route.interaction:
            raise ValueError(f"the plan gives {sample.id} the interaction {route.interaction!r}, the sample has {spec}")
        user = SimulatedUser(stage.interactions.get(spec.name), spec, conversation)
    chat = Conversation(sample, speaker, tools, user, config.rollout, config.sampling)
    return _Cast(speaker, tools, user, chat)


async def _play(cast: _Cast, route: Route, seconds: float | None) -> StopReason:
    try:
        async with waiting.budget(seconds) as deadline:
            if cast.user is not None:
                await cast.user.start()
            reason = await _loop(cast.chat, route)
            await cast.chat.finish()
            return reason
    except TimeoutError:
        if not deadline.expired():
            raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and not task.cancelling():  # nobody asked for it: taken as such, it would stop the run
            raise EpisodeError("something the episode waited for was cancelled from elsewhere") from error
        raise
    with contextlib.suppress(TimeoutError):  # the last answer is shown to the user, who may not take long now
        async with asyncio.timeout(LAST_WORD_SECONDS):
            await cast.chat.finish()
    return StopReason.TIME_BUDGET


async def _loop(chat: Conversation, route: Route) -> StopReason:
    """Let the agent loop play. What a user's own loop raises ends this episode; what was raised through it, the run."""
    try:
        await strangers.tamed(route.loop(chat))
    except EpisodeEnd as end:
        return end.reason
    except Exception as error:
        cause = first_cause(error)
        if isinstance(cause, EpisodeEnd):
            return cause.reason
        ours = chat.broken or (cause if isinstance(cause, TurnwiseError | EpisodeError) else None)
        if ours is not None or not route.is_own:
            raise ours or cause  # noqa: B904 (it has its own cause, which a log shows)
        said = str(cause) if isinstance(cause, strangers.StrangerError) else one_line(cause)
        raise EpisodeError(f"agent loop {route.agent}: {said}") from error
    if chat.broken is not None:
        raise chat.broken
    return chat.ended or StopReason.ANSWERED


@dataclass(slots=True)
class _Closed:
    score: float | None = None
    errors: list[str] = field(default_factory=list)


async def _close(cast: _Cast, *, scored: bool) -> _Closed:
    """Close user, tools and speaker, each whatever became of the others."""
    closed = _Closed()
    try:
        if cast.user is not None:
            closed.score = await cast.user.finish(scored=scored)
    except EpisodeError as error:
        closed.errors.append(str(error))
    finally:
        try:
            closed.errors += await cast.tools.close()
        finally:
            await cast.speaker.close()
    return closed
