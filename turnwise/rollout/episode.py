"""One episode: a sample goes in, a finished trajectory comes out, and everything it opened is closed."""

import asyncio
import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol
from uuid import uuid4

from turnwise.config import Config
from turnwise.engines.samplers.request import NoiseKey
from turnwise.engines.samplers.sampler import Sampler
from turnwise.errors import EpisodeError, TemplateError, TurnwiseError, first_cause, one_line
from turnwise.rollout import plugin_calls
from turnwise.rollout.chat_backends import ChatBackend, TokenBackend
from turnwise.rollout.conversation import Conversation, EpisodeEnd
from turnwise.rollout.routing import Plan, Route
from turnwise.rollout.shared_episode import SharedEpisode
from turnwise.rollout.toolbox.replies import TokenSpans
from turnwise.rollout.toolbox.toolbox import EpisodeTools, Toolbox
from turnwise.rollout.tools.tool import as_json
from turnwise.rollout.users.episode_user import EpisodeUser
from turnwise.rollout.users.loading import Users
from turnwise.storage.underway import playing
from turnwise.system import time_budget
from turnwise.types import Branch, Group, JsonSchema, Ledger, RenderCheck, Role, Sample, StopReason, Trajectory

FINISH_SECONDS = 10.0
"""For the user to judge the last answer of an episode whose time is up."""

_numbers = itertools.count(uuid4().int >> 81)
"""Of conversations: from anywhere on, since engines and users elsewhere may serve several processes."""


class MakeBackend(Protocol):
    """Makes the model's side of one conversation."""

    def __call__(self, conversation: str, noise: NoiseKey, tools: list[JsonSchema]) -> ChatBackend: ...


class Players(Protocol):
    """Processes that play the groups of a run."""

    async def play(self, sample: Sample, siblings: Sequence[int], step: int) -> Group:
        """A group whose episodes have ended; it has none of them before `finish`."""
        ...

    async def finish(self, group: Group) -> None:
        """Give it its trajectories, scored."""
        ...


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """What all episodes of a run share: the part of `prepare.Prepared` that they need, and who writes them.

    One run has several: sampled and greedy episodes, training and evaluation.
    """

    config: Config
    plan: Plan
    toolbox: Toolbox
    users: Users
    make_backend: MakeBackend
    conversation: Callable[..., Conversation] = Conversation
    """Makes what an agent loop drives; a replay has its own."""
    sampler: Sampler | None = None
    """What writes token by token; None where an endpoint does."""
    players: Players | None = None
    """Who plays groups instead of this process."""


@dataclass(slots=True)
class EpisodeParts:
    """Who takes part in one episode."""

    tools: EpisodeTools
    user: EpisodeUser | None
    chat: Conversation
    shared: SharedEpisode


async def run_episode(sample: Sample, *, sibling: int, step: int, context: RolloutContext) -> Trajectory:
    """Play one episode. Failures of tools' and users' code end up on the trajectory; cancellation passes through."""
    start = time.perf_counter()
    route = context.plan.route(sample)
    parts = _open_parts(sample, sibling, step, route, context)
    noise = NoiseKey(context.config.seed, step, sample.id, sibling)
    with playing(sample, sibling, step, parts.chat.messages) as ended:
        ended.append(await _played(parts, route, noise, context, start))
        return ended[0]


async def _played(
    parts: EpisodeParts, route: Route, noise: NoiseKey, context: RolloutContext, start: float
) -> Trajectory:
    reason, failures = StopReason.FAILED, []
    try:
        reason = await _play(parts, route, context.config.rollout.max_seconds)
    except (EpisodeError, TemplateError) as error:  # a template that worked on paper meets what was really said
        failures = [str(error)]
    finally:
        closed = await plugin_calls.to_the_end(_close(parts, reason))
    failures += closed.errors
    artifacts = {name: as_json(value) for name, value in parts.shared.artifacts.items()}
    failures += [
        f"agent loop {route.agent} keeps {name!r}, which is not made of JSON values"
        for name, value in artifacts.items()
        if value is None and parts.shared.artifacts[name] is not None
    ]
    seconds = time.perf_counter() - start
    check = await _checked(parts, noise, context.config)
    branches, segments = _joined(parts.shared.conversations)
    facts = parts.shared.facts
    facts.user_score, facts.tool_rewards = closed.score, parts.tools.rewards
    facts.user_notes = [] if parts.user is None else parts.user.notes
    facts.engine_lost = [lost for chat in parts.shared.conversations for lost in chat.backend.lost]
    parts.shared.conversations.clear()  # they hold it too: only Python's search for cycles would free what they wrote
    return Trajectory(
        sample=parts.shared.sample,
        sibling=noise.sibling,
        step=noise.step,
        messages=parts.chat.messages,
        turns=parts.chat.turns,
        segments=segments,
        stop_reason=StopReason.FAILED if failures else reason,
        seconds=seconds,
        failure="; ".join(failures) or None,
        artifacts=artifacts,
        render_check=check,
        branches=branches,
        facts=facts,
    )


def _joined(conversations: list[Conversation]) -> tuple[list[Branch], list[Ledger]]:
    """The branches, and the ledgers of all: turns and segments are counted through, whoever wrote first."""
    branches: list[Branch] = []
    segments, turns = conversations[0].backend.segments, len(conversations[0].turns)
    for conversation in conversations[1:]:
        if not conversation.turns:  # broken off before the model spoke: there is nothing of its own in it
            continue
        for ledger in conversation.backend.segments:
            ledger.shift_turns(turns)
        for turn in conversation.turns:
            turn.index, turn.segment = turn.index + turns, turn.segment + len(segments)
        segments = [*segments, *conversation.backend.segments]
        turns += len(conversation.turns)
        branches.append(Branch(conversation.name, conversation.messages, conversation.turns, conversation.trained))
    return branches, segments


async def _checked(parts: EpisodeParts, noise: NoiseKey, config: Config) -> RenderCheck | None:
    """The self-check of the conversations: the first that found something, or the main one's."""
    checks: list[RenderCheck] = []
    if not _is_checked(noise, config.chat.check_share):
        return None
    for conversation in parts.shared.conversations:
        if conversation.turns and conversation.backend.segments and not conversation.by_ids:
            # In a thread: it renders and encodes all of the conversation, while others wait for their turn.
            check = await asyncio.to_thread(conversation.backend.check, conversation.messages)
            checks += [] if check is None else [check]
    return next((check for check in checks if not check.exact), checks[0] if checks else None)


def _is_checked(noise: NoiseKey, share: float) -> bool:
    """All of the first round, of training and of evaluation; then a share, which a resumed run draws the same."""
    return noise.step in (0, -1) or noise.bits() < share * 2.0**64


def _open_parts(sample: Sample, sibling: int, step: int, route: Route, context: RolloutContext) -> EpisodeParts:
    config = context.config
    # Unique, though noise is not: a sampler and a user keep state under it, and a sample may be played twice.
    conversation = f"{step}/{sample.id}/{sibling}/{next(_numbers):012x}"
    noise = NoiseKey(config.seed, step, sample.id, sibling)

    def make_backend(name: str, number: int, schemas: list[JsonSchema]) -> ChatBackend:
        if not name:
            return context.make_backend(conversation, noise, schemas)
        return context.make_backend(f"{conversation}/{number}", replace(noise, branch=name), schemas)

    tools = context.toolbox.open(sample, route.tools, noise.bits())
    user = None
    if route.interaction is not None:
        spec = context.users.spec_for(sample)
        if spec is None or spec.name != route.interaction:
            raise ValueError(f"the plan gives {sample.id} the interaction {route.interaction!r}, the sample has {spec}")
        user = EpisodeUser(context.users.get(spec.name), spec, sample, seed=noise.bits(), episode=conversation)
    shared = SharedEpisode(sample, config.rollout, config.sampling, tools, make_backend)
    chat = context.conversation(shared, sample.prompt, context.toolbox.schemas(route.tools), user=user)
    tools.spans, tools.takes_images = _spans(chat.backend), Role.TOOL in chat.backend.image_roles
    # The episode has these tools: held in turn, it would be freed only when Python searches for cycles.
    tools.prepare_images = partial(SharedEpisode.prepare_images, weakref.proxy(shared), chat.backend)
    tools.messages = chat.messages
    return EpisodeParts(tools, user, chat, shared)


def _spans(backend: ChatBackend) -> TokenSpans | None:
    """The model's tokenizer, to count replies with; an endpoint keeps its own to itself."""
    if not isinstance(backend, TokenBackend):
        return None
    encode = backend.renderer.tokenizer.encode
    return lambda text: encode(text).offsets


async def _play(parts: EpisodeParts, route: Route, seconds: float | None) -> StopReason:
    try:
        async with time_budget.budget(seconds) as deadline:
            if parts.user is not None:
                await parts.user.start()
            reason = await _loop(parts.chat, parts.shared, route)
            await parts.chat.finish()
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
        async with asyncio.timeout(FINISH_SECONDS):
            await parts.chat.finish()
    return StopReason.TIME_BUDGET


async def _loop(chat: Conversation, shared: SharedEpisode, route: Route) -> StopReason:
    """Let the agent loop play. What a user's own loop raises ends this episode; what was raised through it, the run."""
    try:
        await plugin_calls.guarded(route.loop(chat))
    except EpisodeEnd as end:
        return end.reason
    except Exception as error:
        cause = first_cause(error)
        if isinstance(cause, EpisodeEnd):
            return cause.reason
        ours = shared.broken or (cause if isinstance(cause, TurnwiseError | EpisodeError) else None)
        if ours is not None or not route.is_own:
            raise ours or cause  # noqa: B904 (it has its own cause, which a log shows)
        text = str(cause) if isinstance(cause, plugin_calls.PluginCallError) else one_line(cause)
        raise EpisodeError(f"agent loop {route.agent}: {text}") from error
    if shared.broken is not None:
        raise shared.broken
    return chat.ended or chat.cut or StopReason.ANSWERED


@dataclass(slots=True)
class _CloseResult:
    score: float | None = None
    errors: list[str] = field(default_factory=list)


async def _close(parts: EpisodeParts, reason: StopReason) -> _CloseResult:
    """Stop what the loop left running, then close user, tools and backends, each whatever became of the others."""
    closed = _CloseResult()
    await parts.shared.stop(reason)
    try:
        if parts.user is not None:
            closed.score = await parts.user.finish(scored=reason is not StopReason.FAILED)
    except EpisodeError as error:
        closed.errors.append(str(error))
    finally:
        try:
            closed.errors += await parts.tools.close(scored=reason is not StopReason.FAILED)
        finally:
            await parts.shared.close()
    return closed
