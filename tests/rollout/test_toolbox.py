"""Tool calls: every call is answered and recorded, whatever the model asks; sessions and tools are found and kept."""

import asyncio
from typing import ClassVar

import pytest
from pydantic import BaseModel

from turnwise.config import Config, RolloutConfig
from turnwise.errors import PluginError
from turnwise.rollout.toolbox.loading import as_tool, builtin_tools, load_tool
from turnwise.rollout.toolbox.toolbox import Toolbox
from turnwise.rollout.tools.calculate import calculate
from turnwise.rollout.tools.tool import ToolContext, tool
from turnwise.types import CallStatus, Sample, ToolCall, ToolResult

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
def test_bad_arguments_are_told_with_their_place(arguments, words, one):
    reply, record = one(plot, arguments)
    assert record.status is CallStatus.BAD_ARGUMENTS
    assert reply.text.startswith("Error: bad arguments for plot") and words in reply.text


def test_arguments_become_what_the_annotations_promise(one):
    reply, record = one(plot, {"points": [{"x": 1}, {"x": 2.0, "y": 3}], "scale": 2})
    assert (reply.text, record.status) == ("[(1, 0), (2, 3)] 2.0", CallStatus.OK)


def test_a_long_argument_is_not_repeated_in_the_error(one):
    reply, _ = one(plot, {"points": "x" * 100_000})
    assert len(reply.text) < 500


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def test_arguments_nested_too_deeply_are_refused(one):
    @tool
    async def anything(value: list) -> str:
        """Take any list."""
        return "ok"

    reply, record = one(anything, {"value": nested(5000)})
    assert record.status is CallStatus.BAD_ARGUMENTS
    assert "nested too deeply" in reply.text


def test_an_unknown_tool_is_named_with_the_nearest(run):
    (reply,), (record,) = run([calculate], [ToolCall("t", "calculator", {})])
    assert record.status is CallStatus.UNKNOWN_TOOL
    assert reply.text == "Error: unknown tool 'calculator': did you mean 'calculate'?"


def test_names_no_tokenizer_could_take_are_cleaned_in_the_reply(run):
    (reply,), (record,) = run([calculate], [ToolCall("t", "calc\ud800\x00", {})])
    assert record.status is CallStatus.UNKNOWN_TOOL
    (reply.text + reply.name).encode()
    assert "\x00" not in reply.text + reply.name


def test_a_malformed_call_is_answered_with_its_problem(run):
    (reply,), (record,) = run([calculate], [ToolCall("t", "", {}, "the call is not valid JSON")])
    assert (reply.text, record.status) == ("Error: the call is not valid JSON", CallStatus.MALFORMED)


def test_calls_over_the_limit_are_answered_and_not_run(run):
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


def test_a_tool_cannot_change_the_record_of_its_call(run):
    class Session:
        async def call(self, arguments):
            arguments["list"].append("changed")
            arguments["new"] = 1
            return ToolResult("ok")

        async def close(self):
            pass

    class Changes:
        name, timeout, concurrency = "changes", 5.0, 1
        schema: ClassVar = {"type": "function", "function": {"name": "changes"}}

        async def open(self, context):
            return Session()

    call = ToolCall("t", "changes", {"list": []})
    _, (record,) = run([Changes()], [call])
    assert record.call.arguments == {"list": []} == call.arguments


def test_what_a_tool_changes_in_its_context_is_not_seen_by_siblings(run):
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


def test_a_session_is_opened_once_per_episode_and_shared_by_its_calls(run):
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
        schema: ClassVar = {"type": "function", "function": {"name": "counter"}}

        async def open(self, context):
            opened.append(context.sample.id)
            await asyncio.sleep(0.01)
            return Session()

    replies, _ = run([Counter()], [ToolCall(f"t{n}", "counter", {}) for n in range(4)])
    assert sorted(reply.text for reply in replies) == ["1", "2", "3", "4"]
    assert opened == ["s", "closed"]


# --- loading ------------------------------------------------------------------------------------------------------


def test_every_builtin_tool_loads_and_has_its_files_name():
    assert {"calculate", "code_interpreter", "python"} <= set(builtin_tools())
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
        schema: ClassVar = {"type": "function", "function": {"name": "two"}}

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


def test_a_schema_is_asked_for_once_however_often_a_tool_makes_it():
    box = Toolbox([load_tool("python", Config())], RolloutConfig())
    assert box.schemas(["python"])[0] is box.schemas(["python"])[0]
