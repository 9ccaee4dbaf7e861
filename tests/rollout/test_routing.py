"""The plan: which loop, tools and user each sample gets, and every wrong name found before anything runs."""

import pytest

from turnwise.config import Config, RolloutConfig
from turnwise.errors import ConfigError, PluginError
from turnwise.rollout.loops.single_turn import single_turn
from turnwise.rollout.loops.tool_calling import tool_calling
from turnwise.rollout.routing import Plan
from turnwise.rollout.toolbox.toolbox import Toolbox
from turnwise.rollout.tools.calculate import calculate
from turnwise.rollout.users.loading import Users
from turnwise.types import InteractionSpec, Sample

ME = __name__


async def my_loop(chat):
    """A loop of one's own."""
    await chat.generate()


def not_async(chat):
    return None


async def takes_nothing():
    return None


async def takes_two(chat, more):
    return None


class LoopObject:
    async def __call__(self, chat):
        await chat.generate()


loop_object = LoopObject()


def plan(samples, *, tools=(), **settings):
    config = RolloutConfig(**settings)
    whole = Config(rollout=config)
    return Plan(samples, whole, Toolbox(list(tools), config), Users(whole))


def only_route(sample, **settings):
    (route,) = plan([sample], **settings).routes
    return route


def make(**fields):
    return Sample("row:7", (), "src", **fields)


@pytest.mark.parametrize(
    ("settings", "fields", "agent", "why"),
    [
        ({}, {}, "single_turn", "inferred: no tools, no interaction"),
        ({"tools": [calculate]}, {}, "tool_calling", "inferred: there are tools"),
        ({"interaction": "gsm8k"}, {}, "tool_calling", "inferred: there is an interaction"),
        ({"tools": [calculate], "interaction": "gsm8k"}, {}, "tool_calling",
         "inferred: there are tools and an interaction"),
        ({"tools": [calculate]}, {"tools": ()}, "single_turn", "inferred: no tools, no interaction"),
        ({}, {"tools": ("calculate",)}, "tool_calling", "inferred: there are tools"),
        ({}, {"interaction": InteractionSpec("gsm8k")}, "tool_calling", "inferred: there is an interaction"),
        ({"agent": "single_turn", "tools": [calculate]}, {}, "single_turn", "rollout.agent"),
        ({"agent": "single_turn"}, {"agent": "tool_agent"}, "tool_calling", "named by the row"),
        ({}, {"agent": "single_turn_agent"}, "single_turn", "named by the row"),
        ({"agent": f"{ME}:my_loop"}, {"agent": f"{ME}:my_loop"}, f"{ME}:my_loop", "named by the row"),
        ({"agent": f"{ME}:loop_object"}, {}, f"{ME}:loop_object", "rollout.agent"),
    ],
)  # fmt: skip
def test_the_loop_is_named_or_inferred_and_the_plan_says_why(settings, fields, agent, why):
    route = only_route(make(**fields), **settings)
    assert (route.agent, route.why) == (agent, why)
    assert route.loop is {"single_turn": single_turn, "tool_calling": tool_calling}.get(
        agent, my_loop if agent.endswith("my_loop") else loop_object
    )


def test_single_turn_gets_neither_tools_nor_user():
    route = only_route(make(agent="single_turn"), tools=[calculate], interaction="gsm8k")
    assert (route.tools, route.interaction) == ((), None)


def test_rows_choose_their_tools_and_routes_are_counted():
    samples = [make(), make(tools=("python",)), make(tools=("python",)), make(tools=())]
    made = plan(samples, tools=[calculate])
    assert {(route.agent, route.tools): count for route, count in made.routes.items()} == {
        ("tool_calling", ("calculate",)): 1,
        ("tool_calling", ("python",)): 2,
        ("single_turn", ()): 1,
    }


@pytest.mark.parametrize("agent", ["single_turn_agent", "single_turn"])
@pytest.mark.parametrize(
    "fields",
    [
        {"interaction": InteractionSpec("gsm8k")},
        {"tools": ("calculate",)},
        {"tools_kwargs": {"calculate": {}}},
    ],
)
def test_a_row_that_names_single_turn_but_brings_more_is_refused(agent, fields):
    with pytest.raises(
        ConfigError,
        match="of its own but its agent is single_turn .named by the row.; set the row's agent_name to tool_calling",
    ):
        plan([make(agent=agent, **fields)], tools=[calculate])
    with pytest.raises(ConfigError, match="rollout.agent"):
        plan([make(**fields)], tools=[calculate], agent=agent)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"agent": "tool_callin"}, "sample row:7: unknown agent loop 'tool_callin': did you mean 'tool_calling'"),
        ({"agent": f"{ME}:my_lop"}, "sample row:7: .*did you mean 'my_loop'"),
        ({"agent": "nowhere:loop"}, "sample row:7: .*no module 'nowhere'"),
        ({"agent": f"{ME}:not_async"}, r"must be written as: async def not_async\(chat\)"),
        ({"agent": f"{ME}:LoopObject"}, r"must be written as: async def LoopObject\(chat\)"),
        ({"agent": f"{ME}:takes_nothing"}, "must take the conversation, and options by keyword only"),
        ({"agent": f"{ME}:takes_two"}, "must take the conversation, and options by keyword only"),
        ({"tools": ("calculat",)}, "sample row:7: tool_selection names 'calculat'.*did you mean 'calculate'"),
        ({"interaction": InteractionSpec("gsm8")}, "sample row:7: unknown interaction 'gsm8': did you mean 'gsm8k'"),
        ({"interaction": InteractionSpec(f"{ME}:LoopObject")}, "sample row:7: .*is not a user: write async def user"),
        ({"interaction": InteractionSpec(f"{ME}:takes_nothing")}, "must take the turn, and options by keyword only"),
    ],
)
def test_unknown_names_are_found_with_their_row_and_the_nearest_name(fields, words):
    user = fields.get("interaction")
    named = {"agent": fields.get("agent"), "interaction": user and user.name}  # rows may name what the config names
    with pytest.raises(PluginError, match=words):
        plan([make(**fields)], **{key: name for key, name in named.items() if name is not None and ":" in name})


def test_notices_say_what_is_configured_and_not_used():
    samples = [make(agent="single_turn"), make(agent="single_turn")]
    notices = plan(samples, tools=[calculate], interaction="gsm8k").notices
    assert notices == [
        "2 samples of src run single-turn (named by the row) and use neither the configured tools nor the interaction",
        "no sample uses the tools calculate",
    ]


def test_no_notice_when_all_is_used():
    assert plan([make()], tools=[calculate], interaction="gsm8k").notices == []


def test_tools_kwargs_nobody_reads_are_noticed():
    samples = [make(tools_kwargs={"python": {"a": 1}}), make(tools_kwargs={"calculate": {}})]
    assert plan(samples, tools=[calculate]).notices == [
        "1 samples have tools_kwargs for 'python', which they cannot call; they have calculate"
    ]


def test_tools_kwargs_of_a_tool_nobody_knows_are_refused():
    with pytest.raises(
        PluginError, match="row:7 has tools_kwargs for the tool 'calculator', .* did you mean 'calculate'"
    ):
        plan([make(tools_kwargs={"calculator": {"a": 1}})], tools=[calculate])


def test_a_sample_not_seen_before_is_routed_too():
    made = plan([make()], tools=[calculate])
    assert made.route(Sample("new", (), "other")).tools == ("calculate",)
    assert len(made.routes) == 1
