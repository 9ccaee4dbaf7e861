"""Tools with a life: created, called, judged and released once, on every path, with what the row gives each hook."""

import asyncio
from typing import Any, ClassVar

import pytest

from turnwise import ToolClass, ToolContext, ToolError
from turnwise.config import Config, RolloutConfig
from turnwise.config.choices import Lifecycle
from turnwise.errors import PluginError
from turnwise.rollout.routing import Plan
from turnwise.rollout.toolbox.classes import class_tool
from turnwise.rollout.toolbox.loading import as_tool
from turnwise.rollout.toolbox.toolbox import Toolbox
from turnwise.rollout.users.loading import Users
from turnwise.types import CallStatus, Sample, ToolCall, ToolResult

happened: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_yet():
    happened.clear()


class Counter(ToolClass):
    """Count."""

    async def create(self, context: ToolContext, start: int = 0) -> None:
        happened.append(f"create {start}")
        self.count = start

    def execute(self, by: int, *, most: int = 100) -> Any:  # plain: in a thread
        happened.append(f"execute {by}")
        if by < 0:
            raise ToolError("only up")
        if by > most:
            raise ValueError("too far")
        self.count += by
        return self.count

    async def calc_reward(self, weight: float = 1.0) -> float:
        happened.append("calc_reward")
        return weight * self.count

    async def release(self, note: str = "") -> None:
        happened.append(f"release {note}".strip())


def play(kind: Any, *arguments: dict[str, Any], lifecycle: str | None = None, **sample: Any) -> Any:
    """(replies, records, rewards, problems) of an episode with one turn for each call."""
    options = {} if lifecycle is None else {as_tool(kind).name: {"lifecycle": lifecycle}}

    async def episode() -> Any:
        box = Toolbox([as_tool(kind)], RolloutConfig(tool_options=options))
        (name,) = box.tools
        tools = box.open(Sample("s", (), "test", **sample), [name])
        replies, records = [], []
        for number, given in enumerate(arguments):
            replies += await tools.call([ToolCall(f"c{number}", name, given)], records)
        problems = await tools.close()
        return [reply.text for reply in replies], records, tools.rewards, problems

    return asyncio.run(episode())


def test_an_instance_lives_as_long_as_the_episode():
    replies, records, rewards, problems = play(Counter, {"by": 2}, {"by": 3})
    assert (replies, rewards, problems) == (["2", "5"], {"counter": 5.0}, [])
    assert happened == ["create 0", "execute 2", "execute 3", "calc_reward", "release"]
    assert [record.score for record in records] == [None, None]


def test_or_as_long_as_a_call_whose_score_is_its_reward():
    replies, records, rewards, problems = play(Counter, {"by": 2}, {"by": 3}, lifecycle="per_call")
    assert (replies, rewards, problems) == (["2", "3"], {}, [])
    assert happened == [
        "create 0",
        "execute 2",
        "calc_reward",
        "release",
        "create 0",
        "execute 3",
        "calc_reward",
        "release",
    ]
    assert [(record.score, record.info) for record in records] == [
        (2.0, {"calc_reward": 2.0}),
        (3.0, {"calc_reward": 3.0}),
    ]


@pytest.mark.parametrize("lifecycle", ["per_call", "per_trajectory"])
def test_what_a_row_gives_reaches_each_hook(lifecycle):
    kwargs = {
        "create_kwargs": {"start": 10}, "execute_kwargs": {"most": 4},
        "calc_reward_kwargs": {"weight": 0.5}, "release_kwargs": {"note": "bye"},
    }  # fmt: skip
    replies, records, rewards, _ = play(
        Counter, {"by": 4}, {"by": 5}, lifecycle=lifecycle, tools_kwargs={"counter": kwargs}
    )
    assert replies == ["14", "Error: ValueError: too far"]
    assert [record.status for record in records] == [CallStatus.OK, CallStatus.CRASHED]
    assert happened[0] == "create 10" and happened[-1] == "release bye"
    assert (rewards, records[0].score) == (({"counter": 7.0}, None) if lifecycle == "per_trajectory" else ({}, 7.0))


@pytest.mark.parametrize("lifecycle", ["per_call", "per_trajectory"])
@pytest.mark.parametrize("by", [-1, 1000])
def test_a_call_that_fails_is_released_all_the_same(lifecycle, by):
    _, records, _, problems = play(Counter, {"by": by}, lifecycle=lifecycle)
    assert records[0].status is (CallStatus.ERROR if by < 0 else CallStatus.CRASHED)
    assert happened.count("release") == 1 and happened[-1] == "release" and problems == []


class Half(Counter):
    """Fails half-way."""

    async def create(self, context: ToolContext, start: int = 0) -> None:
        happened.append("create")
        raise RuntimeError("no room")


@pytest.mark.parametrize("lifecycle", ["per_call", "per_trajectory"])
def test_what_create_left_is_released(lifecycle):
    replies, records, rewards, problems = play(Half, {"by": 1}, {"by": 1}, lifecycle=lifecycle)
    assert replies == ["Error: RuntimeError: no room"] * 2 and records[0].status is CallStatus.CRASHED
    assert happened == ["create", "release"] * 2 and (rewards, problems) == ({}, [])


class Slow(Counter):
    """Takes its time."""

    async def execute(self, by: int) -> str:
        await asyncio.sleep(60)
        return ""


@pytest.mark.parametrize("lifecycle", ["per_call", "per_trajectory"])
def test_a_call_that_is_stopped_is_released(lifecycle):
    async def episode() -> None:
        box = Toolbox([as_tool(Slow)], RolloutConfig(tool_options={"slow": {"timeout": 0.05, "lifecycle": lifecycle}}))
        tools = box.open(Sample("s", (), "test"), ["slow"])
        records: list[Any] = []
        (reply,) = await tools.call([ToolCall("a", "slow", {"by": 1})], records)
        assert reply.text == "Error: slow took longer than 0.05 s" and records[0].status is CallStatus.TIMEOUT
        cancelled = asyncio.ensure_future(tools.call([ToolCall("b", "slow", {"by": 1})], records))
        while happened.count("create 0") < (2 if lifecycle == "per_call" else 1):
            await asyncio.sleep(0.01)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await tools.close(scored=False) == []

    asyncio.run(episode())
    assert "calc_reward" not in happened
    assert happened.count("release") == happened.count("create 0") == (2 if lifecycle == "per_call" else 1)


def test_calls_of_one_turn_reach_an_instance_one_after_the_other():
    class Careful(ToolClass):
        """Count what is under way."""

        async def create(self, context: ToolContext) -> None:
            self.inside = 0

        async def execute(self) -> int:
            self.inside += 1
            await asyncio.sleep(0.005)
            seen, self.inside = self.inside, self.inside - 1
            return seen

    async def episode() -> list[str]:
        tools = Toolbox([as_tool(Careful)], RolloutConfig()).open(Sample("s", (), "test"), ["careful"])
        replies = await tools.call([ToolCall(f"{n}", "careful", {}) for n in range(5)], [])
        assert await tools.close() == [] and tools.rewards == {}
        return [reply.text for reply in replies]

    assert asyncio.run(episode()) == ["1"] * 5


class Liar(Counter):
    """Says nonsense at the end."""

    async def calc_reward(self) -> Any:
        return "much"


class Fails(Counter):
    """Fails at the end."""

    async def release(self) -> None:
        raise RuntimeError("cannot")


def test_what_goes_wrong_at_the_end_is_told():
    assert "calc_reward returned 'much', not a finite number" in play(Liar, {"by": 1})[3][0]
    assert happened[-1] == "release"
    assert play(Fails, {"by": 1})[3] == ["closing tool fails: RuntimeError: cannot"]


def test_the_model_is_shown_its_parameters_only():
    class Search(ToolClass):
        name = "look"
        timeout: ClassVar[float] = 3

        def execute(self, query: str, context: ToolContext, *, top: int = 3) -> Any:
            """Look something up.

            Args:
                query: What for.
            """
            return ToolResult(f"{query} {top} {context.sample.id}", score=2)

    found = class_tool(Search, {})
    assert (found.name, found.timeout, found.lifecycle) == ("look", 3, Lifecycle.per_trajectory)
    parameters = found.schema["function"]["parameters"]
    assert parameters["properties"] == {"query": {"type": "string", "description": "What for."}}
    kwargs = {"look": {"execute_kwargs": {"top": 7}}}
    replies, records, _, _ = play(Search, {"query": "x"}, {"query": 3}, tools_kwargs=kwargs)
    assert replies[0] == "x 7 s" and records[0].score == 2.0 and records[1].status is CallStatus.BAD_ARGUMENTS


def test_instances_have_a_config_of_their_own():
    class Spoils(ToolClass):
        """Change the config."""

        def execute(self) -> int:
            self.config["seen"].append(1)
            return len(self.config["seen"])

    spoils = class_tool(Spoils, {"seen": []})
    assert play(spoils, {}, {})[0] == ["1", "2"] and play(spoils, {})[0] == ["1"] and spoils.config == {"seen": []}


class NoExecute(ToolClass):
    """Nothing."""


class Static(ToolClass):
    """Odd."""

    @staticmethod
    def execute(by: int) -> int:
        return by


class NoContext(ToolClass):
    """Odd."""

    def create(self) -> None: ...
    def execute(self) -> str:
        return ""


class Undocumented(ToolClass):
    def execute(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (NoExecute, "NoExecute has no `execute`"),
        (Static, "Static.execute must be an ordinary method"),
        (NoContext, r"NoContext.create must take \(self, context, ...\)"),
        (Undocumented, "needs a docstring"),
    ],
)
def test_classes_that_are_no_tools_are_refused(kind, problem):
    with pytest.raises(PluginError, match=problem):
        as_tool(kind)


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({"create_kwarg": {}}, "tools_kwargs.counter: unknown key 'create_kwarg': did you mean 'create_kwargs'"),
        ({"create_kwargs": {"strat": 1}}, "create_kwargs: unknown argument 'strat': did you mean 'start'"),
        ({"execute_kwargs": {"by": 1}}, "execute_kwargs: unknown argument 'by'"),
    ],
)
def test_a_row_that_gives_what_nobody_reads_is_refused(kwargs, problem):
    config = RolloutConfig()
    box = Toolbox([as_tool(Counter)], config)
    with pytest.raises(PluginError, match=f"sample s: .*{problem}"):
        Plan([Sample("s", (), "d", tools_kwargs={"counter": kwargs})], Config(), box, Users(Config()))
