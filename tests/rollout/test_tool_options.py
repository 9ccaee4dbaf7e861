"""What a run sets for one tool is kept: time, calls at once and per second, tokens of a reply; images reach who sees them."""

import asyncio
import base64

import pytest

from turnwise import tool
from turnwise.config import RolloutConfig
from turnwise.config.choices import Keep, Lifecycle
from turnwise.errors import ConfigError, PluginError
from turnwise.rollout.toolbox.options import RateLimit, ToolOptions, read_options, with_options
from turnwise.rollout.toolbox.toolbox import Toolbox
from turnwise.rollout.tools.calculate import calculate
from turnwise.system import time_budget
from turnwise.types import CallStatus, Image, Sample, Text, ToolCall, ToolResult

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


def test_options_are_read_by_name_with_their_kinds():
    given = {"timeout": 5, "rate_limit": 0.5, "keep": "tail", "lifecycle": "per_call", "concurrency": None}
    assert read_options(given, "x") == ToolOptions(5, None, 0.5, None, Keep.tail, Lifecycle.per_call)
    assert read_options({}, "x") == ToolOptions()
    assert ToolOptions(timeout=1).over(ToolOptions(timeout=2, concurrency=3)) == ToolOptions(timeout=1, concurrency=3)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"time": 1}, r"x: unknown option 'time': did you mean 'timeout'\?"),
        ({"timeout": 0}, r"x\.timeout must be more than 0, not 0"),
        ({"timeout": "5"}, r"x\.timeout must be a number, not '5'"),
        ({"concurrency": 1.5}, r"x\.concurrency must be a whole number"),
        ({"rate_limit": float("inf")}, r"x\.rate_limit must be a finite number, more than 0"),
        ({"max_reply_tokens": True}, r"x\.max_reply_tokens must be a whole number"),
        ({"keep": "middle"}, r"x\.keep must be one of 'head', 'tail', 'both', not 'middle'"),
        ({"lifecycle": []}, r"x\.lifecycle must be one of"),
        ({"frame": "<output>"}, r"x\.frame must be words with \{output\} in them once, not '<output>'"),
        ({"frame": 5}, r"x\.frame must be words"),
        ([], r"x must be options by name"),
    ],
)
def test_options_that_cannot_be_used_are_refused(given, problem):
    with pytest.raises(ConfigError, match=problem):
        read_options(given, "x")


def test_options_of_no_tool_are_refused_with_the_nearest():
    with pytest.raises(
        ConfigError, match="rollout.tool_options: there is no tool 'calculat': did you mean 'calculate'"
    ):
        Toolbox([calculate], RolloutConfig(tool_options={"calculat": {"timeout": 1}}))
    Toolbox([], RolloutConfig(tool_options={"calculate": {"timeout": 1}}))  # a sample may select it
    with pytest.raises(PluginError, match="'calculate' has no lifecycle"):
        Toolbox([calculate], RolloutConfig(tool_options={"calculate": {"lifecycle": "per_call"}}))


@tool(timeout=0.01)
async def slow() -> str:
    """Take a while."""
    await asyncio.sleep(0.2)
    return "done"


def test_the_tools_own_option_wins_over_the_runs_and_the_configs_over_the_files(run):
    calls = [ToolCall("a", "slow", {})]
    assert run([slow], calls)[1][0].status is CallStatus.TIMEOUT
    assert run([slow], calls, tool_timeout=30)[1][0].status is CallStatus.OK
    assert (
        run([slow], calls, tool_timeout=30, tool_options={"slow": {"timeout": 0.01}})[1][0].status is CallStatus.TIMEOUT
    )
    in_file = with_options(slow, ToolOptions(timeout=0.01))
    assert run([in_file], calls, tool_timeout=30)[1][0].status is CallStatus.TIMEOUT
    assert run([in_file], calls, tool_options={"slow": {"timeout": 30}})[1][0].status is CallStatus.OK


def test_calls_at_once_are_limited(run):
    under_way = [0, 0]

    @tool
    async def count() -> str:
        """Count calls under way."""
        under_way[0] += 1
        under_way[1] = max(under_way)
        await asyncio.sleep(0.002)
        under_way[0] -= 1
        return ""

    run([count], [ToolCall(str(n), "count", {}) for n in range(6)], tool_options={"count": {"concurrency": 2}})
    assert under_way == [0, 2]


def test_calls_begin_at_the_rate_in_their_order_and_waiting_is_not_the_episodes_time(monkeypatch):
    """The clock is moved by whoever sleeps, so that no time is measured."""
    now, begun, started = [100.0], [], asyncio.sleep

    async def sleep(seconds):
        until = now[0] + seconds
        await started(0)
        now[0] = max(now[0], until)

    async def calls() -> None:
        rate = RateLimit(4)

        async def one(number):
            await rate.turn()
            begun.append((number, now[0]))

        async with time_budget.budget(0.5) as deadline:
            for number in range(5):
                await one(number)
            assert not deadline.expired()
        left = asyncio.ensure_future(rate.turn())
        await started(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        await one(5)  # nobody came after the one that left: its turn is free

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(time_budget, "clock", lambda: now[0])
    asyncio.run(calls())
    assert begun == [(number, 100 + number / 4) for number in range(6)]


def test_one_rate_limit_serves_all_toolboxes_of_a_run():
    box = Toolbox([calculate], RolloutConfig(tool_options={"calculate": {"rate_limit": 5}}))
    other = Toolbox(box.shared(), RolloutConfig(tool_options={"calculate": {"rate_limit": 5}}))
    assert box.shared()[0] is other.shared()[0]


def test_an_instant_tool_that_is_limited_is_limited(run):
    answers = run(
        [calculate],
        [ToolCall("a", "calculate", {"expression": "6*7"})],
        tool_options={"calculate": {"rate_limit": 100}},
    )
    assert answers[0][0].text == "42"


def test_each_tool_has_its_own_length_of_reply(run):
    @tool
    def long() -> str:
        """Say much."""
        return "x" * 500

    @tool
    def other() -> str:
        """Say much."""
        return "y" * 500

    calls = [ToolCall("a", "long", {}), ToolCall("b", "other", {})]
    options = {"long": {"max_reply_tokens": 10, "keep": "head"}}
    (cut, whole), records = run([long, other], calls, tool_options=options)
    assert cut.text == "x" * 40 + "\n[... 460 characters left out ...]\n" and whole.text == "y" * 500
    assert [record.truncated for record in records] == [True, False]


@pytest.mark.parametrize("takes_images", [True, False])
def test_images_are_kept_and_shown_to_who_sees_them(takes_images, tmp_path):
    (tmp_path / "dot.png").write_bytes(PIXEL)

    @tool
    def draw() -> ToolResult:
        """Draw a dot."""
        return ToolResult("here", images=(Image(str(tmp_path / "dot.png")),))

    async def call():
        records = []
        tools = Toolbox([draw], RolloutConfig()).open(Sample("s", (), "d"), ["draw"], takes_images=takes_images)
        (reply,) = await tools.call([ToolCall("a", "draw", {})], records)
        return reply, records[0]

    reply, record = asyncio.run(call())
    url = f"data:image/png;base64,{base64.b64encode(PIXEL).decode()}"
    assert record.status is CallStatus.OK and record.info["images"] == [{"name": "image_1", "data": url}]
    if takes_images:
        assert reply.content == (Text("here"), Image(url))
    else:
        assert reply.content == "here\n[1 images are not shown: the model reads text only]"
