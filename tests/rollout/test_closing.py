"""Whatever happens to an episode, its user and every tool session are closed exactly once, and its sampler released."""

import asyncio
import gc
from collections import Counter
from typing import ClassVar

import pytest

from turnwise.errors import EngineError, EpisodeError, PluginError
from turnwise.rollout import plugin_calls
from turnwise.rollout.conversation import Conversation
from turnwise.rollout.tools.tool import ToolContext
from turnwise.rollout.users.user import Reply
from turnwise.types import CallStatus, Ledger, StopReason, ToolResult

ME = __name__


class Scene:
    """What the tool and the user of a test do, and what was done to them."""

    def __init__(self):
        self.tool = "ok"
        self.opening = "ok"
        self.closing = "ok"
        self.user = "ok"
        self.starting = "ok"
        self.finishing = "ok"
        self.scoring = "ok"
        self.reached = asyncio.Event()
        self.done = Counter()
        self.live = set()


SCENE = Scene()


async def act(what):
    match what:
        case "hang":
            SCENE.reached.set()
            await asyncio.Event().wait()
        case "raise":
            raise RuntimeError("broken")
        case "exit":
            raise SystemExit(3)
        case "stubborn":  # ignores the first cancellation, ends soon after
            SCENE.reached.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(0)


class Session:
    def __init__(self):
        SCENE.done["opened"] += 1
        self.closed = False

    async def call(self, arguments):
        assert not self.closed
        await act(SCENE.tool)
        return ToolResult("fine")

    async def close(self):
        assert not self.closed
        self.closed = True
        SCENE.done["closed"] += 1
        await act(SCENE.closing)


class StatefulTool:
    name = "stateful"
    timeout = 60.0
    concurrency = 4
    schema: ClassVar = {"type": "function", "function": {"name": "stateful", "description": "Has sessions."}}

    async def open(self, context: ToolContext):
        await act(SCENE.opening)
        return Session()


class Visitor:
    async def start(self, context):
        self.id = context.id
        assert self.id not in SCENE.live
        SCENE.live.add(self.id)
        SCENE.done["started"] += 1
        await act(SCENE.starting)

    async def reply(self, turn):
        await act(SCENE.user)
        return Reply("bye", 1.0, end=True)

    async def score(self):
        await act(SCENE.scoring)
        return 1.0

    async def close(self):
        SCENE.live.remove(self.id)
        SCENE.done["finalised"] += 1
        await act(SCENE.finishing)


@pytest.fixture(autouse=True)
def scene(monkeypatch):
    monkeypatch.setattr(plugin_calls, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr("turnwise.rollout.toolbox.toolbox.CLOSE_SECONDS", 0.3)
    monkeypatch.setattr("turnwise.rollout.users.episode_user.CLOSE_SECONDS", 0.3)
    monkeypatch.setattr("turnwise.rollout.episode.FINISH_SECONDS", 0.1)
    SCENE.__init__()
    return SCENE


@pytest.fixture
def rollout(rollouts, call):
    return rollouts.make([call("stateful"), "#### 42"], tools=[StatefulTool()], interaction=f"{ME}:Visitor")


def check_closed(rollout, *, opened=1):
    assert SCENE.done["started"] == SCENE.done["finalised"] == 1
    assert SCENE.live == set()
    assert SCENE.done["opened"] == SCENE.done["closed"] == opened
    assert set(rollout.sampler.released.values()) <= {1}
    assert rollout.sampler._turns == {}


async def alone_afterwards(work):
    """Run to the end and show that no task is left running."""
    try:
        return await work
    finally:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, others


def play(rollout):
    return asyncio.run(alone_afterwards(rollout.episode()))


def test_success(rollout):
    trajectory = play(rollout)
    assert trajectory.stop_reason is StopReason.USER_ENDED
    check_closed(rollout)


def test_a_tool_that_is_never_called_is_never_opened(rollouts):
    rollout = rollouts.make(["#### 42"], tools=[StatefulTool()], interaction=f"{ME}:Visitor")
    trajectory = play(rollout)
    assert trajectory.calls == []
    check_closed(rollout, opened=0)


@pytest.mark.parametrize("what", ["raise", "exit"])
def test_tool_error(rollout, what):
    SCENE.tool = what
    trajectory = play(rollout)
    assert trajectory.stop_reason is StopReason.USER_ENDED and trajectory.failure is None
    assert [record.status for record in trajectory.calls] == [CallStatus.CRASHED]
    check_closed(rollout)


def test_tool_timeout(rollout):
    SCENE.tool = "hang"
    rollout.context.config.rollout.tool_timeout = 0.05
    trajectory = play(rollout)
    assert [record.status for record in trajectory.calls] == [CallStatus.TIMEOUT]
    check_closed(rollout)


@pytest.mark.parametrize("what", ["raise", "exit"])
def test_a_session_that_does_not_open_is_told_and_tried_again(rollouts, call, what):
    SCENE.opening = what
    rollout = rollouts.make([call("stateful"), call("stateful"), "#### 42"], tools=[StatefulTool()])

    def script(request):
        if request.turn == 1:
            SCENE.opening = "ok"
        return [call("stateful"), call("stateful"), "#### 42"][request.turn]

    rollout = rollouts.make(script, tools=[StatefulTool()], interaction=f"{ME}:Visitor")
    trajectory = play(rollout)
    assert [record.status for record in trajectory.calls] == [CallStatus.CRASHED, CallStatus.OK]
    assert ("broken" if what == "raise" else "SystemExit: 3") in trajectory.turns[0].replies[0].text
    check_closed(rollout)


@pytest.mark.parametrize("where", ["user", "starting"])
@pytest.mark.parametrize("what", ["raise", "exit"])
def test_interaction_error(rollout, where, what):
    setattr(SCENE, where, what)
    trajectory = play(rollout)
    assert trajectory.stop_reason is StopReason.FAILED
    assert trajectory.failure.startswith(f"interaction '{ME}:Visitor': ")
    assert ("RuntimeError: broken" if what == "raise" else "SystemExit: 3") in trajectory.failure
    check_closed(rollout, opened=1 if where == "user" else 0)


@pytest.mark.parametrize("where", ["finishing", "scoring", "closing"])
@pytest.mark.parametrize("what", ["raise", "exit", "hang"])
def test_errors_while_closing_are_on_the_trajectory_and_the_rest_is_closed(rollout, where, what):
    setattr(SCENE, where, what)
    trajectory = play(rollout)
    assert trajectory.stop_reason is StopReason.FAILED
    text = {"raise": "RuntimeError: broken", "exit": "SystemExit: 3", "hang": "0.3 s"}[what]
    assert text in trajectory.failure
    assert len(trajectory.turns) == 2
    check_closed(rollout)


@pytest.mark.parametrize("where", ["tool", "opening", "user", "starting"])
def test_time_budget(rollout, where):
    setattr(SCENE, where, "hang")
    rollout.context.config.rollout.max_seconds = 0.4
    trajectory = play(rollout)
    assert trajectory.stop_reason is StopReason.TIME_BUDGET and trajectory.failure is None
    check_closed(rollout, opened={"tool": 1, "opening": 0, "user": 1, "starting": 0}[where])


def test_time_budget_with_a_session_that_opens_after_all_is_closed(rollout):
    SCENE.opening = "stubborn"
    rollout.context.config.rollout.max_seconds = 0.4
    assert play(rollout).stop_reason is StopReason.TIME_BUDGET
    check_closed(rollout, opened=1)


async def cancelled(rollout, times=1):
    task = asyncio.ensure_future(rollout.episode())
    hanging = asyncio.ensure_future(rollout.sampler.generating.wait())
    reached = asyncio.ensure_future(SCENE.reached.wait())
    await asyncio.wait((hanging, reached), return_when=asyncio.FIRST_COMPLETED)
    hanging.cancel(), reached.cancel()
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    return task


@pytest.mark.parametrize("times", [1, 5])
@pytest.mark.parametrize("where", ["generate", "tool", "opening", "user", "starting", "scoring", "closing"])
@pytest.mark.parametrize("what", ["hang", "stubborn"])
def test_cancellation(rollout, where, what, times):
    opened = {"generate": 1, "tool": 1, "opening": int(what == "stubborn"), "starting": 0}.get(where, 1)
    if where == "generate":
        rollout.sampler.hang_at = 1
    else:
        setattr(SCENE, where, what)
    task = asyncio.run(alone_afterwards(cancelled(rollout, times)))
    assert task.cancelled()
    check_closed(rollout, opened=opened)


def test_a_cancelled_group_closes_every_sibling(rollouts, call):
    SCENE.tool = "hang"
    rollout = rollouts.make([call("stateful"), "#### 42"], tools=[StatefulTool()], interaction=f"{ME}:Visitor")

    async def work():
        task = asyncio.ensure_future(rollout.group(3))
        while SCENE.done["opened"] < 3:
            await asyncio.sleep(0)
        await SCENE.reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(alone_afterwards(work()))
    assert SCENE.done["started"] == SCENE.done["finalised"] == SCENE.done["opened"] == SCENE.done["closed"] == 3
    assert len(rollout.sampler.released) == 3


def test_ctrl_c_closes_everything_before_the_loop_ends(rollout):
    """What asyncio.run does on an interrupt: the main task is cancelled, and all others after it has ended."""
    SCENE.tool = "hang"

    async def main():
        main_task = asyncio.current_task()
        episode = asyncio.ensure_future(rollout.group(2))
        await SCENE.reached.wait()
        asyncio.get_running_loop().call_soon(main_task.cancel)
        await episode

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert SCENE.done["opened"] == SCENE.done["closed"] > 0
    assert SCENE.done["started"] == SCENE.done["finalised"] == 2


@pytest.mark.parametrize("error", [EngineError("no such model"), PluginError("wrong"), ZeroDivisionError()])
def test_a_fatal_error_stops_the_run_and_closes(rollout, error):
    rollout.sampler.error, rollout.sampler.error_at = error, 1
    with pytest.raises(type(error)):
        play(rollout)
    check_closed(rollout)


def test_a_fatal_error_in_one_sibling_closes_the_others(rollouts, call):
    SCENE.tool = "hang"

    def script(request):
        if request.noise.sibling == 1:
            raise ZeroDivisionError("a bug")
        return call("stateful")

    rollout = rollouts.make(script, tools=[StatefulTool()], interaction=f"{ME}:Visitor")
    with pytest.raises(ZeroDivisionError, match="a bug"):
        asyncio.run(alone_afterwards(rollout.group(3)))
    assert SCENE.done["started"] == SCENE.done["finalised"] == 3
    assert SCENE.done["opened"] == SCENE.done["closed"]


def test_sampler_error_of_one_episode(rollout):
    rollout.sampler.error, rollout.sampler.error_at = EpisodeError("lost"), 1
    trajectory = play(rollout)
    assert (trajectory.stop_reason, trajectory.failure) == (StopReason.FAILED, "lost")
    check_closed(rollout)


def test_a_failing_episode_with_failing_closers_reports_all(rollout):
    rollout.sampler.error, rollout.sampler.error_at = EpisodeError("lost"), 1
    SCENE.finishing = SCENE.closing = "raise"
    trajectory = play(rollout)
    assert trajectory.failure.startswith("lost; interaction")
    assert "closing tool stateful" in trajectory.failure
    check_closed(rollout)


async def cancels_itself(chat):
    await chat.generate()
    raise asyncio.CancelledError


def test_a_cancellation_nobody_asked_for_is_a_failure_not_the_end_of_the_run(rollouts):
    rollout = rollouts.make(["a"], agent=f"{ME}:cancels_itself")
    trajectory = asyncio.run(rollout.group(2)).trajectories[1]
    assert trajectory.stop_reason is StopReason.FAILED
    assert "cancelled from elsewhere" in trajectory.failure


def test_two_episodes_of_the_same_sample_and_sibling_do_not_share_state(rollout):
    """Noise is the same, names are not."""

    async def both():
        return await asyncio.gather(rollout.episode(), rollout.episode())

    first, second = asyncio.run(both())
    assert first.segments == second.segments
    assert len(rollout.sampler.released) == 2
    assert SCENE.done["finalised"] == 2


@pytest.mark.parametrize("seconds", [None, 60.0])
def test_what_an_episode_wrote_is_freed_with_its_trajectory(rollouts, seconds):
    """By counting references: where only Python's search for cycles frees it, a run's memory grows until there is one."""
    rollout = rollouts.make(["It is 42."], max_seconds=seconds)

    async def group():
        return await rollout.group(3)

    def held():
        return sum(type(one) in (Ledger, Conversation) for one in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = held()
        found = asyncio.run(group())
        assert held() - before == 3 and len(found.trajectories) == 3
        del found
        assert held() == before
    finally:
        gc.enable()
