"""Tool calls: every call is answered and recorded, whatever the model asks and the tool does."""

import asyncio
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from turnwise.choices import Keep
from turnwise.config import RolloutConfig
from turnwise.errors import EpisodeError, PluginError, ToolError
from turnwise.rollout import strangers
from turnwise.rollout.toolbox import Toolbox, _fit, as_tool, builtin_tools, clean, load_tool
from turnwise.rollout.tools.calculate import calculate
from turnwise.rollout.tools.tool import ToolContext, tool
from turnwise.types import CallStatus, Image, Role, Sample, ToolCall, ToolResult


def run(tools, calls, *, sample=None, **settings):
    """The messages and records of one turn, and what closing said."""
    config = RolloutConfig(**settings)

    async def turn():
        box = Toolbox([as_tool(entry) for entry in tools], config)
        episode = box.open(sample or Sample("s", (), "test"), [entry.name for entry in box.tools.values()])
        records = []
        try:
            return await episode.call(calls, records), records
        finally:
            assert await episode.close() == []

    return asyncio.run(turn())


def one(chosen, arguments=None, **settings):
    """(reply, record) of one call."""
    (reply,), (record,) = run([chosen], [ToolCall("t0", as_tool(chosen).name, arguments or {})], **settings)
    assert reply.role is Role.TOOL and reply.tool_call_id == "t0"
    assert record.call == ToolCall("t0", as_tool(chosen).name, arguments or {})
    return reply, record


def returns(value):
    def give():
        """Return a value."""
        return value

    return give


def raises(error):
    def fail():
        """Raise an error."""
        raise error

    return fail


def async_raises(error):
    async def fail():
        """Raise an error."""
        raise error

    return fail


# --- what tools return --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("hello", "hello"),
        ("", ""),
        (7, "7"),
        (0.5, "0.5"),
        (True, "true"),
        ([1, "ä"], '[1, "ä"]'),
        ({"a": None}, '{"a": null}'),
        (ToolResult("fine"), "fine"),
        ("nul \x00 and half \ud83d a pair", "nul \N{REPLACEMENT CHARACTER} and half \N{REPLACEMENT CHARACTER} a pair"),
        ("a pair \ud83d\ude00", "a pair \U0001f600"),
    ],
)
def test_what_can_be_shown_is_shown(value, text):
    reply, record = one(returns(value))
    assert (reply.text, record.status) == (text, CallStatus.OK)
    assert reply.text.encode().decode() == text


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"bytes",
        object(),
        (1, 2),
        {1, 2},
        {"a": object()},
        ToolResult(None),
        ToolResult("x", score=float("nan")),
        ToolResult("x", score="much"),
        ToolResult("x", info={"a": object()}),
        ToolResult("x", info=["not", "a", "dict"]),
    ],
    ids=repr,
)
def test_what_cannot_be_shown_or_stored_is_an_error_the_model_is_told(value):
    reply, record = one(returns(value))
    assert record.status is CallStatus.ERROR
    assert reply.text.startswith("Error: the tool")


def test_a_cycle_is_an_error():
    cycle = []
    cycle.append(cycle)
    assert one(returns(cycle))[1].status is CallStatus.ERROR


def test_score_and_info_are_recorded_as_a_copy():
    info = {"seen": [1]}
    _, record = one(returns(ToolResult("x", score=1, info=info)))
    info["seen"].append(2)
    assert (record.score, record.info) == (1.0, {"seen": [1]})


def test_an_image_stops_the_run_instead_of_being_lost():
    with pytest.raises(PluginError, match="image"):
        one(returns(ToolResult("look", images=(Image("a.png"),))))


@pytest.mark.parametrize("keep", Keep)
def test_ten_megabytes_are_cut_and_say_so(keep):
    text = "a" * 5_000_000 + "b" * 5_000_000
    reply, record = one(returns(text), max_tool_reply_chars=100, keep=keep)
    assert record.truncated and record.status is CallStatus.OK
    assert "9999900 characters left out" in reply.text
    kept = reply.text.replace("\n[... 9999900 characters left out ...]\n", "")
    assert kept == {Keep.head: "a" * 100, Keep.tail: "b" * 100, Keep.both: "a" * 50 + "b" * 50}[keep]


@given(text=st.text(max_size=40), limit=st.integers(0, 45), keep=st.sampled_from(Keep))
def test_fitting_keeps_exactly_the_limit(text, limit, keep):
    shown, cut = _fit(text, limit, keep)
    assert cut == (len(text) > limit)
    if not cut:
        assert shown == text
        return
    note = f"\n[... {len(text) - limit} characters left out ...]\n"
    head, found, tail = shown.partition(note)
    assert found and len(head) + len(tail) == limit
    assert text.startswith(head) and text.endswith(tail)
    assert {Keep.head: not tail, Keep.tail: not head, Keep.both: len(head) - len(tail) in (0, 1)}[keep]


@given(st.text(st.characters()))
def test_cleaned_text_is_encodable_and_otherwise_unchanged(text):
    cleaned = clean(text)
    cleaned.encode()
    assert "\x00" not in cleaned
    if text.isprintable() and not any("\ud800" <= c <= "\udfff" for c in text):
        assert cleaned == text


# --- what tools raise ---------------------------------------------------------------------------------------------


class Odd(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ToolError("try 6*7"), "Error: try 6*7"),
        (ValueError("bad \ud800"), "Error: ValueError: bad \N{REPLACEMENT CHARACTER}"),
        (TimeoutError("of its own"), "Error: TimeoutError: of its own"),
        (StopIteration(3), "StopIteration"),
        (SystemExit(3), "Error: SystemExit: 3"),
        (Odd("odd"), "Error: Odd: odd"),
        (asyncio.CancelledError("me"), "CancelledError"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("make", [raises, async_raises])
def test_whatever_a_tool_raises_is_told_and_the_run_goes_on(make, error, text):
    reply, record = one(make(error))
    assert record.status is CallStatus.ERROR
    assert text in reply.text


@pytest.mark.parametrize("leave", [sys.exit, lambda: (_ for _ in ()).throw(KeyboardInterrupt)])
def test_a_synchronous_tool_cannot_take_the_process_down(leave):
    def quits():
        """Leave."""
        leave()

    reply, record = one(quits)
    assert record.status is CallStatus.ERROR
    assert "SystemExit" in reply.text or "KeyboardInterrupt" in reply.text


@pytest.mark.parametrize("error", [EpisodeError("sandbox gone"), PluginError("wrong set-up")])
@pytest.mark.parametrize("make", [raises, async_raises])
def test_infrastructure_failures_are_not_the_models_business(make, error):
    with pytest.raises(type(error), match=str(error)):
        one(make(error))


# --- time ---------------------------------------------------------------------------------------------------------


@tool(timeout=0.05)
async def hangs() -> str:
    """Never come back."""
    await asyncio.Event().wait()
    return ""


def test_a_hanging_coroutine_is_stopped():
    reply, record = one(hangs)
    assert record.status is CallStatus.TIMEOUT
    assert reply.text == "Error: hangs took longer than 0.05 s"


def test_a_hanging_thread_is_left_behind_and_the_loop_goes_on():
    release = threading.Event()

    @tool(timeout=0.05)
    def blocks() -> str:
        """Block."""
        release.wait(30)
        return "late"

    try:
        reply, record = one(blocks)
        assert record.status is CallStatus.TIMEOUT
    finally:
        release.set()


def test_a_coroutine_that_ignores_cancellation_is_left_behind(monkeypatch):
    monkeypatch.setattr(strangers, "GRACE_SECONDS", 0.05)
    stop = False

    @tool(timeout=0.05)
    async def stubborn() -> str:
        """Go on whatever happens."""
        while not stop:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return "late"

    async def main():
        nonlocal stop
        box = Toolbox([stubborn], RolloutConfig())
        records = []
        await box.open(Sample("s", (), "test"), ["stubborn"]).call([ToolCall("t", "stubborn", {})], records)
        stop = True
        return records[0].status

    assert asyncio.run(main()) is CallStatus.TIMEOUT


def test_too_many_hanging_calls_stop_the_run(monkeypatch):
    monkeypatch.setattr(strangers, "MAX_LEFT_BEHIND", 3)
    monkeypatch.setattr(strangers, "_left_behind", [])
    release = threading.Event()

    @tool(timeout=0.01)
    def blocks() -> str:
        """Block."""
        release.wait(30)
        return "late"

    try:
        for _ in range(3):
            assert one(blocks)[1].status is CallStatus.TIMEOUT
        with pytest.raises(PluginError, match="3 calls of tools or users hang"):
            one(blocks)
    finally:
        release.set()
    for thread in [entry for entry in strangers._left_behind if isinstance(entry, threading.Thread)]:
        thread.join(10)
    assert one(blocks)[1].status is CallStatus.OK, "those that came back are no longer counted"


def test_the_configured_timeout_replaces_the_tools_own():
    assert one(hangs, tool_timeout=0.01)[0].text.endswith("longer than 0.01 s")


def test_waiting_for_a_slot_does_not_count_as_the_tools_time():
    @tool(timeout=5, concurrency=1)
    async def slow() -> str:
        """Take a while."""
        await asyncio.sleep(0.02)
        return "done"

    replies, records = run([slow], [ToolCall(f"t{n}", "slow", {}) for n in range(8)], tool_timeout=0.1)
    assert [record.status for record in records] == [CallStatus.OK] * 8


# --- side by side -------------------------------------------------------------------------------------------------


def test_parallel_calls_run_side_by_side_and_keep_their_order():
    barrier = None

    @tool
    async def meet(number: int) -> str:
        """Wait for all the others: alone, this would never end."""
        nonlocal barrier
        barrier = barrier or asyncio.Barrier(8)
        await barrier.wait()
        await asyncio.sleep((8 - number) / 500)
        return f"number {number}"

    replies, records = run([meet], [ToolCall(f"t{n}", "meet", {"number": n}) for n in range(8)], tool_timeout=20)
    assert [reply.text for reply in replies] == [f"number {n}" for n in range(8)]
    assert [reply.tool_call_id for reply in replies] == [f"t{n}" for n in range(8)]
    assert [record.call.id for record in records] == [f"t{n}" for n in range(8)]


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_concurrency_of_a_tool_is_respected_over_all_episodes(kind):
    busy = most = 0
    lock = threading.Lock()

    def enter(step):
        nonlocal busy, most
        with lock:
            busy += step
            most = max(most, busy)

    async def work():
        """Work."""
        enter(1)
        await asyncio.sleep(0.002)
        enter(-1)
        return "ok"

    def sync_work():
        """Work."""
        enter(1)
        time.sleep(0.002)
        enter(-1)
        return "ok"

    chosen = tool(name="work", concurrency=3)(work if kind == "async" else sync_work)

    async def main():
        box = Toolbox([chosen], RolloutConfig())
        episodes = [box.open(Sample(f"s{n}", (), "test"), ["work"]) for n in range(10)]
        await asyncio.gather(*(e.call([ToolCall("a", "work", {}), ToolCall("b", "work", {})], []) for e in episodes))

    asyncio.run(main())
    assert most == 3
    asyncio.run(main()), "slots are made anew for a second event loop"


def test_a_slow_tool_does_not_hold_up_another():
    gate = asyncio.Event()

    @tool(concurrency=1)
    async def slow() -> str:
        """Wait for the quick one."""
        await gate.wait()
        return "slow"

    @tool(concurrency=1)
    async def quick() -> str:
        """Let the slow one go."""
        gate.set()
        return "quick"

    replies, _ = run([slow, quick], [ToolCall("a", "slow", {}), ToolCall("b", "quick", {})], tool_timeout=20)
    assert [reply.text for reply in replies] == ["slow", "quick"]


def test_blocking_tools_do_not_hold_up_each_other():
    barrier = threading.Barrier(6)

    @tool
    def meet() -> str:
        """Block until six calls block."""
        barrier.wait(20)
        return "met"

    replies, _ = run([meet], [ToolCall(f"t{n}", "meet", {}) for n in range(6)])
    assert {reply.text for reply in replies} == {"met"}


def test_one_failure_of_the_infrastructure_stops_the_other_calls():
    stopped = []

    @tool
    async def waits() -> str:
        """Wait."""
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(True)
        return ""

    @tool
    async def fails() -> str:
        """Fail."""
        await asyncio.sleep(0.01)
        raise EpisodeError("gone")

    with pytest.raises(EpisodeError, match="gone"):
        run([waits, fails], [ToolCall("a", "waits", {}), ToolCall("b", "fails", {})])
    assert stopped == [True]


# --- what the model asks ------------------------------------------------------------------------------------------


class Point(BaseModel):
    x: int
    y: int = 0


@tool
async def plot(points: list[Point], scale: float = 1.0) -> str:
    """Plot points."""
    return f"{[(p.x, p.y) for p in points]} {scale!r}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "'points' is a required property"),
        ({"points": 3}, "points: 3 is not of type 'array'"),
        ({"points": [{"x": 1}, {"x": "one"}]}, "points.1.x: 'one' is not of type 'integer'"),
        ({"points": [{}]}, "points.0: 'x' is a required property"),
        ({"points": [], "scale": "big"}, "scale: 'big' is not of type 'number'"),
        ({"points": [], "scael": 2}, "unknown parameter 'scael': did you mean 'scale'?"),
    ],
)
def test_bad_arguments_are_told_with_their_place(arguments, words):
    reply, record = one(plot, arguments)
    assert record.status is CallStatus.BAD_ARGUMENTS
    assert reply.text.startswith("Error: bad arguments for plot") and words in reply.text


def test_arguments_become_what_the_annotations_promise():
    reply, record = one(plot, {"points": [{"x": 1}, {"x": 2.0, "y": 3}], "scale": 2})
    assert (reply.text, record.status) == ("[(1, 0), (2, 3)] 2.0", CallStatus.OK)


def test_a_long_argument_is_not_repeated_in_the_error():
    reply, _ = one(plot, {"points": "x" * 100_000})
    assert len(reply.text) < 500


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def test_arguments_nested_too_deeply_are_refused():
    @tool
    async def anything(value: list) -> str:
        """Take any list."""
        return "ok"

    reply, record = one(anything, {"value": nested(5000)})
    assert record.status is CallStatus.BAD_ARGUMENTS
    assert "nested too deeply" in reply.text


def test_an_unknown_tool_is_named_with_the_nearest():
    (reply,), (record,) = run([calculate], [ToolCall("t", "calculator", {})])
    assert record.status is CallStatus.UNKNOWN_TOOL
    assert reply.text == "Error: unknown tool 'calculator': did you mean 'calculate'?"


def test_names_no_tokenizer_could_take_are_cleaned_in_the_reply():
    (reply,), (record,) = run([calculate], [ToolCall("t", "calc\ud800\x00", {})])
    assert record.status is CallStatus.UNKNOWN_TOOL
    (reply.text + reply.name).encode()
    assert "\x00" not in reply.text + reply.name


def test_a_malformed_call_is_answered_with_its_problem():
    (reply,), (record,) = run([calculate], [ToolCall("t", "", {}, "the call is not valid JSON")])
    assert (reply.text, record.status) == ("Error: the call is not valid JSON", CallStatus.MALFORMED)


def test_calls_over_the_limit_are_answered_and_not_run():
    ran = []

    @tool
    async def count(number: int) -> str:
        """Count."""
        ran.append(number)
        return str(number)

    calls = [ToolCall(f"t{n}", "count", {"number": n}) for n in range(5)]
    replies, records = run([count], calls, max_parallel_calls=3)
    assert sorted(ran) == [0, 1, 2]
    assert [record.status for record in records] == [CallStatus.OK] * 3 + [CallStatus.REFUSED] * 2
    assert len(replies) == 5


# --- state --------------------------------------------------------------------------------------------------------


def test_a_tool_cannot_change_the_record_of_its_call():
    class Session:
        async def call(self, arguments):
            arguments["list"].append("changed")
            arguments["new"] = 1
            return ToolResult("ok")

        async def close(self):
            pass

    class Changes:
        name, timeout, concurrency = "changes", 5.0, 1
        schema = {"type": "function", "function": {"name": "changes"}}

        async def open(self, context):
            return Session()

    call = ToolCall("t", "changes", {"list": []})
    _, (record,) = run([Changes()], [call])
    assert record.call.arguments == {"list": []} == call.arguments


def test_what_a_tool_changes_in_its_context_is_not_seen_by_siblings():
    @tool
    async def draw(context: ToolContext) -> str:
        """Take one card."""
        context.kwargs["cards"].pop()
        context.sample.info["touched"] = True
        return str(len(context.kwargs["cards"]))

    sample = Sample("s", (), "test", tools_kwargs={"draw": {"cards": [1, 2, 3]}})
    for _ in range(2):
        replies, _ = run([draw], [ToolCall("a", "draw", {}), ToolCall("b", "draw", {})], sample=sample)
        assert sorted(reply.text for reply in replies) == ["1", "2"], "state lasts through the episode"
    assert sample.tools_kwargs == {"draw": {"cards": [1, 2, 3]}} and sample.info == {}


def test_a_session_is_opened_once_per_episode_and_shared_by_its_calls():
    opened = []

    class Session:
        count = 0

        async def call(self, arguments):
            self.count += 1
            return ToolResult(str(self.count))

        async def close(self):
            opened.append("closed")

    class Counter:
        name, timeout, concurrency = "counter", 5.0, 9
        schema = {"type": "function", "function": {"name": "counter"}}

        async def open(self, context):
            opened.append(context.sample.id)
            await asyncio.sleep(0.01)
            return Session()

    replies, _ = run([Counter()], [ToolCall(f"t{n}", "counter", {}) for n in range(4)])
    assert sorted(reply.text for reply in replies) == ["1", "2", "3", "4"]
    assert opened == ["s", "closed"]


# --- loading ------------------------------------------------------------------------------------------------------


def test_every_builtin_tool_loads_and_has_its_files_name():
    assert builtin_tools() == ["calculate", "python"]
    for name in builtin_tools():
        assert load_tool(name).name == name


def test_unknown_tools_name_the_nearest():
    with pytest.raises(PluginError, match="did you mean 'calculate'"):
        load_tool("calculat")
    with pytest.raises(PluginError, match="has no 'nothing'"):
        load_tool(f"{__name__}:nothing")


def test_a_plain_function_of_a_module_is_a_tool():
    assert load_tool(f"{__name__}:plain").name == "plain"


def plain(x: int) -> int:
    """Twice."""
    return 2 * x


@pytest.mark.parametrize("found", [3, "text", Point, None])
def test_what_is_no_tool_is_refused(found):
    with pytest.raises(PluginError, match="is not a tool"):
        as_tool(found)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(PluginError, match="two tools are called 'calculate'"):
        Toolbox([calculate, calculate], RolloutConfig())


def test_a_tool_whose_schema_has_another_name_is_refused():
    class Two:
        name, timeout, concurrency = "one", 1.0, 1
        schema = {"type": "function", "function": {"name": "two"}}

        async def open(self, context):
            raise AssertionError

    with pytest.raises(PluginError, match="its schema calls it 'two'"):
        Toolbox([Two()], RolloutConfig())


def test_samples_select_tools_and_builtin_ones_join():
    box = Toolbox([calculate], RolloutConfig())
    assert box.names_for(Sample("s", (), "t")) == ("calculate",)
    assert box.names_for(Sample("s", (), "t", tools=())) == ()
    assert box.names_for(Sample("s", (), "t", tools=("python",))) == ("python",)
    assert box.names_for(Sample("s", (), "t")) == ("calculate",), "what one row selects is not offered to the others"
    with pytest.raises(PluginError, match="sample s: .*'pyton'.*did you mean 'python'"):
        box.names_for(Sample("s", (), "t", tools=("pyton",)))
