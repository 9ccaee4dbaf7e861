"""What an agent loop may do: alternate, and be told plainly when it does not."""

import asyncio
import contextlib
import sys
import time
from dataclasses import replace

import pytest

from turnwise.errors import PluginError
from turnwise.rollout.tools.calculate import calculate
from turnwise.rollout.tools.tool import tool
from turnwise.rollout.users.user import Reply
from turnwise.types import CallStatus, Message, Role, StopReason

ME = __name__


async def sceptic(turn):
    """Never believes it."""
    return Reply("Are you sure?", score=0.0)


@tool
async def wordy() -> str:
    """A long reply."""
    return "x " * 20


async def generates_twice(chat):
    await chat.generate()
    await chat.generate()


async def adds_twice(chat):
    await chat.generate()
    chat.add([Message(Role.USER, "a")])
    chat.add([Message(Role.USER, "b")])


async def adds_first(chat):
    chat.add([Message(Role.USER, "a")])


async def calls_first(chat):
    await chat.call_tools(Message(Role.ASSISTANT, "x"))


async def asks_first(chat):
    await chat.ask_user()


async def speaks_for_the_assistant(chat):
    await chat.generate()
    chat.add([Message(Role.ASSISTANT, "I said so")])


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (generates_twice, "generates twice in a row"),
        (adds_twice, "adds replies twice in a row"),
        (adds_first, "must generate first"),
        (calls_first, "must generate first"),
        (asks_first, "must generate first"),
        (speaks_for_the_assistant, "only the policy speaks as the assistant"),
    ],
)
def test_a_loop_that_would_spoil_the_ledger_is_stopped(rollouts, loop, words):
    with pytest.raises(PluginError, match=words):
        rollouts.make(["hm"], agent=f"{ME}:{loop.__name__}").play()


async def raises(chat):
    await chat.generate()
    raise ZeroDivisionError("a bug of the loop")


async def raises_in_a_group(chat):
    async def bug():
        raise ZeroDivisionError("a bug of the loop")

    await chat.generate()
    async with asyncio.TaskGroup() as group:
        group.create_task(bug())


async def exits(chat):
    await chat.generate()
    sys.exit("a bug of the loop")


async def times_out(chat):
    await chat.generate()
    raise TimeoutError("a bug of the loop")


@pytest.mark.parametrize("loop", [raises, raises_in_a_group, exits, times_out])
def test_a_users_loop_that_raises_ends_its_episode_and_not_the_run(rollouts, loop):
    trajectory = rollouts.make(["hm"], agent=f"{ME}:{loop.__name__}").play()
    assert trajectory.stop_reason is StopReason.FAILED and len(trajectory.turns) == 1
    told = trajectory.failure or ""
    assert told.startswith(f"agent loop {ME}:{loop.__name__}: ") and told.endswith("a bug of the loop")


def test_a_bug_of_a_built_in_loop_stops_the_run(rollouts):
    rollout = rollouts.make(["hm"])
    broken = replace(rollout.context.plan.route(rollout.samples[0]), loop=raises)
    rollout.context.plan.route = lambda sample: broken
    with pytest.raises(ZeroDivisionError, match="a bug of the loop"):
        rollout.play()


async def ends_in_a_group(chat):
    async with asyncio.TaskGroup() as group:
        await group.create_task(chat.generate())


def test_an_end_inside_a_group_of_errors_is_an_end(rollouts):
    trajectory = rollouts.make(["hm hm hm hm"], agent=f"{ME}:ends_in_a_group", max_tokens=2).play()
    assert trajectory.stop_reason is StopReason.TURN_TRUNCATED and trajectory.failure is None


async def hides_errors(chat):
    with contextlib.suppress(Exception):
        await chat.generate()


async def dresses_errors_up(chat):
    try:
        await chat.generate()
    except Exception as error:
        raise ValueError("something") from error


@pytest.mark.parametrize("loop", [hides_errors, dresses_errors_up, ends_in_a_group])
def test_an_engine_that_fails_is_never_a_matter_of_the_loop(rollouts, loop):
    rollout = rollouts.make(["hm"], agent=f"{ME}:{loop.__name__}")
    rollout.sampler.error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        rollout.play()


async def no_calls(chat):
    for _ in range(5):
        message = await chat.generate()
        assert await chat.call_tools(message) == []
        chat.add([Message(Role.USER, "more")])


def test_a_message_without_calls_counts_as_no_malformed_call(rollouts):
    rollout = rollouts.make(["hm"], agent=f"{ME}:no_calls", max_malformed_calls=2)
    trajectory = rollout.play()
    assert trajectory.stop_reason is StopReason.ANSWERED and len(trajectory.turns) == 5


async def one_call_at_a_time(chat):
    message = await chat.generate()
    replies = []
    for call in message.tool_calls:
        replies += await chat.call_tools(Message(Role.ASSISTANT, "", (call,)))
    chat.add(replies)
    await chat.generate()


def test_calls_answered_one_by_one_are_all_recorded(rollouts, call):
    said = [call("calculate", expression="1") + call("calculate", expression="2"), "#### 2"]
    rollout = rollouts.make(said, tools=[calculate], agent=f"{ME}:one_call_at_a_time")
    trajectory = rollout.play()
    rollout.check_tokens(trajectory)
    assert [record.status for record in trajectory.calls] == [CallStatus.OK] * 2
    assert [reply.text for reply in trajectory.turns[0].replies] == ["1", "2"]


async def odd_words(chat):
    await chat.generate()
    chat.add([Message(Role.USER, "half \ud83d nul \x00")])
    await chat.generate()


def test_a_loops_own_words_are_made_fit_for_tokenizers(rollouts):
    rollout = rollouts.make(["hm"], agent=f"{ME}:odd_words")
    trajectory = rollout.play()
    rollout.check_tokens(trajectory)
    assert trajectory.messages[3].text == "half \N{REPLACEMENT CHARACTER} nul \N{REPLACEMENT CHARACTER}"


def test_turns_carry_their_times(rollouts, call):
    trajectory = rollouts.make([call("calculate", expression="1"), "#### 1"], tools=[calculate]).play()
    assert all(turn.generate_seconds > 0 for turn in trajectory.turns)
    assert trajectory.turns[0].reply_seconds > 0 and trajectory.turns[1].reply_seconds == 0
    assert trajectory.seconds >= sum(turn.generate_seconds + turn.reply_seconds for turn in trajectory.turns)


def test_a_group_holds_its_siblings_in_order(rollouts):
    group = asyncio.run(rollouts.make(lambda r: f"I am {r.noise.sibling}").group(4))
    assert [t.answers[0].text for t in group.trajectories] == [f"I am {n}" for n in range(4)]


def test_the_time_of_a_users_reply_is_how_long_it_took(rollouts):
    """Not when it came."""
    begun = time.perf_counter()
    trajectory = rollouts.make(["a", "b"], interaction=f"{ME}:sceptic", max_assistant_turns=2).play()
    took = time.perf_counter() - begun
    assert 0 < trajectory.turns[0].reply_seconds <= took


def test_a_lone_conversation_at_its_token_budget_ends_and_waits_for_nobody(rollouts, call, monkeypatch):
    """Only another conversation of the episode that still holds tokens could give some back. Replies are held back, as
    those with images are that are still to be prepared."""
    monkeypatch.setattr("turnwise.rollout.chat_backends.TokenBackend.has_prepared", lambda self, images: False)
    free = rollouts.make([call("wordy"), "done"], tools=[wordy]).play()
    rollout = rollouts.make([call("wordy"), "done"], tools=[wordy])
    rollout.context.config.rollout.max_tokens = free.turns[1].start - free.turns[0].start

    async def played():
        return await asyncio.wait_for(rollout.episode(), 30)

    trajectory = asyncio.run(played())
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.TOKEN_BUDGET, 1)
