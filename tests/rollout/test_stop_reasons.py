"""Every way an episode can end is reached, recorded, and leaves a last answer that can be scored."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from turnwise.chat.formats import hermes
from turnwise.config.choices import HistoryPolicy
from turnwise.errors import EpisodeError
from turnwise.rollout.endpoint_backend import EndpointBackend
from turnwise.rollout.episode import run_episode
from turnwise.rollout.tools.calculate import calculate
from turnwise.rollout.tools.tool import tool
from turnwise.rollout.users.user import Reply
from turnwise.system import time_budget
from turnwise.types import CallStatus, FinishReason, Image, Message, Role, StopReason, Text

ME = __name__


class Watcher:
    """Asks until it has said `times` things, and keeps what it saw."""

    seen: ClassVar[list[str]] = []
    scored: ClassVar[list[str]] = []
    live: ClassVar[set[str]] = set()

    def __init__(self, times: int = 10**9):
        self.times = times

    async def start(self, context):
        self.id = context.id
        self.live.add(self.id)

    async def reply(self, turn):
        assert turn.messages[-1].role is Role.ASSISTANT
        self.seen.append(turn.messages[-1].text)
        return Reply("Are you sure?", 0.5, end=turn.number > self.times)

    async def score(self):
        self.scored.append(self.id)
        return 0.25

    async def close(self):
        self.live.remove(self.id)


class Patience(Watcher):
    """Never answers."""

    async def reply(self, turn):
        self.seen.append(turn.messages[-1].text)
        await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def _nothing_seen():
    forget()


def forget():
    """What the users of earlier episodes saw."""
    for book in (Watcher.seen, Watcher.scored, Watcher.live):
        book.clear()


@tool
async def hang() -> str:
    """Never come back."""
    await asyncio.Event().wait()
    return ""


@tool
async def shout(times: int) -> str:
    """A long reply."""
    return "x " * times


@tool
async def breaks() -> str:
    """The machine under the tool is gone."""
    raise EpisodeError("the sandbox is gone")


def watched(rollouts, said, *, tools=(calculate,), times=10**9, user="Watcher", **settings):
    kwargs = {"times": times}
    return rollouts.make(said, tools=tools, interaction=f"{ME}:{user}", interaction_kwargs=kwargs, **settings)


def check(rollout, reason, *, last, turns, user="Watcher"):
    """The reason stands, the ledger is exact, the last answer is there and the user has seen it, once."""
    forget()
    trajectory = rollout.play()
    watcher = Watcher
    rollout.check_tokens(trajectory)
    assert trajectory.stop_reason is reason
    assert trajectory.failure is None
    assert len(trajectory.turns) == turns
    assert trajectory.answers[-1].text == last
    assert watcher.seen[-1] == last
    assert watcher.live == set()
    assert trajectory.facts.user_score == 0.25
    assert len(watcher.scored) == 1
    assert sum(rollout.sampler.released.values()) == len(trajectory.segments)
    return trajectory, watcher


def test_answered_when_nobody_asks_for_more(rollouts, call):
    rollout = rollouts.make([call("calculate", expression="6*7"), "#### 42"], tools=[calculate])
    trajectory = rollout.play()
    rollout.check_tokens(trajectory)
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert trajectory.answers[-1].text == "#### 42"
    assert trajectory.turns[-1].user_score is None


def test_user_ended(rollouts):
    trajectory, watcher = check(watched(rollouts, ["a", "b"], times=1), StopReason.USER_ENDED, last="b", turns=2)
    assert watcher.seen == ["a", "b"]
    assert [turn.user_score for turn in trajectory.turns] == [0.5, 0.5]
    assert trajectory.messages[-1].text == "b"


def test_token_budget_inside_an_answer(rollouts, renderer):
    said = "one two three four five six seven"
    rollout = watched(rollouts, [said])
    rollout.context.config.rollout.max_tokens = 5
    trajectory, _ = check(
        rollout,
        StopReason.TOKEN_BUDGET,
        last=renderer.tokenizer.decode(renderer.tokenizer.encode(said).ids[:5]),
        turns=1,
    )
    assert trajectory.turns[0].completion_tokens == 5
    assert trajectory.turns[0].finish_reason is FinishReason.LENGTH


def test_token_budget_by_replies_and_exact_fit(rollouts, call):
    """A reply that leaves just one token for the assistant is taken; one that leaves none ends the episode."""
    said = [call("shout", times=20), "#### 42"]
    free = rollouts.make(said, tools=[shout]).play()
    used = free.turns[1].start - free.turns[0].start
    for budget, turns, reason in ((used + 1, 2, StopReason.TOKEN_BUDGET), (used, 1, StopReason.TOKEN_BUDGET)):
        rollout = watched(rollouts, said, tools=[shout])
        rollout.context.config.rollout.max_tokens = budget
        trajectory, _ = check(
            rollout,
            reason,
            last=free.answers[0].text if turns == 1 else trajectory_text(rollouts, free, 1),
            turns=turns,
        )
        assert sum(len(ledger) for ledger in trajectory.segments) - trajectory.turns[0].start <= budget
        assert trajectory.turns[0].calls[0].status is CallStatus.OK
        assert trajectory.turns[0].replies[0].role is Role.TOOL
        assert (trajectory.turns[0].replies[0] in trajectory.messages) == (turns == 2)


def trajectory_text(rollouts, trajectory, tokens):
    """The first tokens of the last answer."""
    start = trajectory.turns[-1].start
    return rollouts.renderer.tokenizer.decode(trajectory.segments[0].token_ids[start : start + tokens])


def test_turn_truncated(rollouts, renderer):
    said = "one two three four five six seven"
    cut = renderer.tokenizer.decode(renderer.tokenizer.encode(said).ids[:4])
    trajectory, _ = check(watched(rollouts, [said], max_tokens=4), StopReason.TURN_TRUNCATED, last=cut, turns=1)
    assert trajectory.turns[0].finish_reason is FinishReason.LENGTH
    assert trajectory.render_check.exact


def test_turn_truncated_inside_a_tool_call_runs_nothing(rollouts, call):
    text = call("calculate", expression="6*7")
    rollout = watched(rollouts, [text], max_tokens=6)
    trajectory = rollout.play()
    assert trajectory.stop_reason is StopReason.TURN_TRUNCATED
    assert trajectory.calls == []
    assert Watcher.seen == [trajectory.answers[0].text]


@pytest.mark.parametrize("spare", [0, 1])
def test_context_full_by_replies(rollouts, call, spare):
    said = [call("shout", times=20), "#### 42"]
    free = rollouts.make(said, tools=[shout]).play()
    rollout = watched(rollouts, said, tools=[shout], context_length=free.turns[1].start + spare)
    last = free.answers[0].text if spare == 0 else trajectory_text(rollouts, free, 1)
    trajectory, _ = check(rollout, StopReason.CONTEXT_FULL, last=last, turns=1 + spare)
    assert len(trajectory.segments[0]) <= free.turns[1].start + spare
    assert (trajectory.turns[0].replies[0] in trajectory.messages) == bool(spare), "shown only when it can be answered"


def test_context_full_before_the_first_word(rollouts):
    rollout = watched(rollouts, ["a"], context_length=3)
    trajectory = rollout.play()
    assert trajectory.stop_reason is StopReason.CONTEXT_FULL
    assert trajectory.turns == [] and trajectory.answers == []
    assert trajectory.render_check is None
    assert Watcher.live == set()


def test_the_tighter_of_two_limits_is_the_reason(rollouts):
    rollout = watched(rollouts, ["one two three four five six"], max_tokens=3)
    rollout.context.config.rollout.max_tokens = 2
    assert rollout.play().stop_reason is StopReason.TOKEN_BUDGET


def test_assistant_turn_budget_by_the_user(rollouts):
    rollout = watched(rollouts, ["a", "b", "c", "d"], max_assistant_turns=3)
    trajectory, watcher = check(rollout, StopReason.ASSISTANT_TURN_BUDGET, last="c", turns=3)
    assert watcher.seen == ["a", "b", "c"]
    assert trajectory.messages[-1].role is Role.ASSISTANT
    assert [m.text for m in trajectory.turns[-1].replies] == ["Are you sure?"], "said, recorded, not shown"


def test_assistant_turn_budget_by_tools(rollouts, call):
    text = call("calculate", expression="6*7")
    rollout = watched(rollouts, [text], max_assistant_turns=2)
    trajectory, watcher = check(rollout, StopReason.ASSISTANT_TURN_BUDGET, last=text, turns=2)
    assert watcher.seen == [text], "only the last message is shown: the first was answered by a tool"
    assert trajectory.turns[-1].replies[0].text == "42"
    assert trajectory.messages[-1].role is Role.ASSISTANT


def test_user_turn_budget(rollouts):
    rollout = watched(rollouts, ["a", "b", "c", "d"], max_user_turns=2)
    trajectory, watcher = check(rollout, StopReason.USER_TURN_BUDGET, last="c", turns=3)
    assert watcher.seen == ["a", "b", "c"]
    assert [turn.user_score for turn in trajectory.turns] == [0.5] * 3


def test_tool_replies_do_not_count_as_user_turns(rollouts, call):
    said = [call("calculate", expression="1"), call("calculate", expression="2"), "a", "b"]
    rollout = watched(rollouts, said, max_user_turns=1)
    trajectory, _ = check(rollout, StopReason.USER_TURN_BUDGET, last="b", turns=4)
    assert sum(reply.role is Role.USER for turn in trajectory.turns for reply in turn.replies) == 1


def test_excess_calls_are_answered_not_dropped(rollouts, call):
    text = "".join(call("calculate", expression=str(n)) for n in range(4))
    rollout = rollouts.make([text, "#### 1"], tools=[calculate], max_parallel_calls=2)
    trajectory = rollout.play()
    rollout.check_tokens(trajectory)
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert [record.status for record in trajectory.calls] == [CallStatus.OK] * 2 + [CallStatus.REFUSED] * 2
    replies = trajectory.turns[0].replies
    assert [reply.text for reply in replies[:2]] == ["0", "1"]
    assert all("at most 2 calls" in reply.text for reply in replies[2:])
    assert [reply.tool_call_id for reply in replies] == [c.id for c in trajectory.answers[0].tool_calls]


def test_malformed_call_budget(rollouts):
    text = "<tool_call>\nnot json\n</tool_call>"
    rollout = watched(rollouts, [text], max_malformed_calls=3)
    trajectory, _ = check(rollout, StopReason.MALFORMED_CALL_BUDGET, last=text, turns=3)
    assert [record.status for record in trajectory.calls] == [CallStatus.MALFORMED] * 3
    assert all(turn.replies[0].text.startswith("Error: the call is not valid JSON") for turn in trajectory.turns)
    assert [m.role for m in trajectory.messages].count(Role.TOOL) == 2


def test_a_good_call_between_malformed_ones_starts_the_count_anew(rollouts, call):
    bad, good = "<tool_call>\n{\n</tool_call>", call("calculate", expression="1")
    said = [bad, good, bad + good, bad, "#### 1"]
    rollout = rollouts.make(said, tools=[calculate], max_malformed_calls=2)
    trajectory = rollout.play()
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert sum(record.status is CallStatus.MALFORMED for record in trajectory.calls) == 3


def test_time_budget_in_a_tool(rollouts, call):
    text = call("calculate", expression="6*7") + call("hang")
    rollout = watched(rollouts, [text], tools=[hang, calculate], max_seconds=0.4)
    trajectory, watcher = check(rollout, StopReason.TIME_BUDGET, last=text, turns=1)
    assert [record.status for record in trajectory.calls] == [CallStatus.OK, CallStatus.TIMEOUT]
    assert watcher.seen == [text]
    assert trajectory.render_check.exact


def test_time_budget_while_the_model_writes(rollouts, call):
    text = call("calculate", expression="6*7")
    rollout = watched(rollouts, [text, "#### 42"], max_seconds=0.4)
    rollout.sampler.hang_at = 1
    trajectory, watcher = check(rollout, StopReason.TIME_BUDGET, last=text, turns=1)
    assert watcher.seen == [text]
    assert trajectory.messages[-1].role is Role.TOOL, "the reply was heard, the answer to it was not"
    assert trajectory.render_check.exact


def test_time_budget_with_a_user_who_hangs_asks_once(rollouts):
    rollout = watched(rollouts, ["a"], user="Patience", max_seconds=0.4)
    trajectory, watcher = check(rollout, StopReason.TIME_BUDGET, last="a", turns=1, user="Patience")
    assert watcher.seen == ["a"]
    assert trajectory.turns[0].user_score is None


def test_waiting_for_a_tools_slot_is_not_the_episodes_time(rollouts, call, monkeypatch):
    """Three episodes, one slot, 40 seconds a call, 50 seconds each: the last waits for 80 and still has its time."""

    class Loop(asyncio.SelectorEventLoop):
        now = 0.0

        def time(self):
            return self.now

    loop = Loop()
    monkeypatch.setattr(time_budget, "clock", loop.time)

    @tool(concurrency=1, timeout=1e6)
    async def slow() -> str:
        """Take long."""
        loop.now += 40.0
        for _ in range(20):
            await asyncio.sleep(0)
        return "done"

    rollout = rollouts.make([call("slow"), "#### 42"], tools=[slow], max_seconds=50.0)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        group = runner.run(rollout.group(3))
    assert [t.stop_reason for t in group.trajectories] == [StopReason.ANSWERED] * 3


@pytest.mark.parametrize("kind", ["sampler", "tool"])
def test_failed(rollouts, call, kind):
    said = ["a", call("breaks"), "c"]
    rollout = watched(rollouts, said, tools=[breaks])
    if kind == "sampler":
        rollout.sampler.error, rollout.sampler.error_at = EpisodeError("the engine lost the request"), 1
    trajectory = rollout.play()
    watcher = Watcher
    assert trajectory.stop_reason is StopReason.FAILED
    assert trajectory.failure == ("the engine lost the request" if kind == "sampler" else "the sandbox is gone")
    assert trajectory.answers[0].text == "a" == watcher.seen[0]
    assert watcher.live == set() and watcher.scored == []
    assert trajectory.facts.user_score is None
    assert trajectory.turns[0].user_score == 0.5
    if kind == "tool":
        assert [record.status for record in trajectory.calls] == [CallStatus.ERROR]
    assert sum(rollout.sampler.released.values()) == 1


async def stubborn(chat):
    """Swallows the end of the episode and goes on."""
    for _ in range(5):
        try:
            await chat.generate()
            chat.add([Message(Role.USER, "go on")])
        except Exception:
            continue


def test_a_loop_cannot_go_on_after_the_end(rollouts):
    rollout = rollouts.make(["a", "b", "c"], agent=f"{ME}:stubborn", max_assistant_turns=2)
    trajectory = rollout.play()
    assert trajectory.stop_reason is StopReason.ASSISTANT_TURN_BUDGET
    assert len(trajectory.turns) == 2 == len(rollout.sampler.requests)


async def shows_two(chat: Any) -> None:
    """Two images, of which nobody has looked at the second when the budget says no."""
    chat.reprompt([Message(Role.USER, (Image("data:,"), Text("?"), Image("data:,")))])
    await chat.generate()


def test_image_budget(rollouts):
    rollout = rollouts.make(["42"], agent=f"{__file__}:shows_two", max_images=1)
    context = replace(
        rollout.context,
        make_backend=lambda conversation, noise, tools: EndpointBackend(
            None, rollout.context.config.sampling, tools, noise, hermes
        ),
    )
    trajectory = asyncio.run(run_episode(rollout.samples[0], sibling=0, step=0, context=context))
    assert trajectory.stop_reason is StopReason.IMAGE_BUDGET and not trajectory.turns


async def gives_up(base_url, sample):
    async with httpx.AsyncClient(trust_env=False) as client:
        asked = {"model": "m", "messages": [{"role": "user", "content": "6*7?"}]}
        (await client.post(f"{base_url}/chat/completions", json=asked)).raise_for_status()
    raise LookupError("the model names no tool of mine")


def test_agent_error(rollouts):
    trajectory = rollouts.make(["42"], client=f"{__file__}:gives_up").play()
    assert trajectory.stop_reason is StopReason.AGENT_ERROR and trajectory.failure is None


def test_every_reason_has_a_test_here():
    text = Path(__file__).read_text()
    ours = [reason for reason in StopReason if reason is not StopReason.UNKNOWN]  # that one is for others' records
    assert [reason for reason in ours if f"StopReason.{reason.name}" not in text] == []


PICKY = """
{%- for m in messages -%}
{%- if m.role == "assistant" and "zebra" in m.content and not loop.last -%}{{ raise_exception("no zebras") }}{%- endif -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


@pytest.mark.parametrize("history", HistoryPolicy)
def test_words_that_the_template_cannot_show(rollouts, history):
    picky = rollouts.renderer_with(PICKY, history)
    rollout = rollouts.make(["a zebra #### 41", "#### 42"], renderer=picky, interaction="code_verify")
    trajectory = rollout.play()
    assert trajectory.stop_reason is StopReason.TEMPLATE_REFUSED and trajectory.failure is None
    assert len(trajectory.turns) == 1 and len(trajectory.segments) == 1, "what it wrote is there, and scored"
    rollout.check_tokens(trajectory)


DEAF = PICKY.replace('m.role == "assistant" and "zebra" in m.content and not loop.last', "loop.index0 > 2")


def test_a_conversation_that_the_template_cannot_show_fails_its_episode_only(rollouts):
    """Not because of the policy's words: it is no end that could be scored, and no reason to stop the others."""
    rollout = rollouts.make(
        ["#### 41"] * 4, renderer=rollouts.renderer_with(DEAF, HistoryPolicy.auto), interaction="code_verify"
    )
    trajectory = rollout.play()
    assert trajectory.stop_reason is StopReason.FAILED and "no zebras" in trajectory.failure
