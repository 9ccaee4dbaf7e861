"""verl's tool classes and function tools, written as its documentation shows, through the stand-ins."""

import asyncio
import base64
import contextlib
import dataclasses
import importlib.util
import io
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from turnwise.config.choices import Lifecycle
from turnwise.errors import PluginError, ToolError
from turnwise.ext.research.corpus.articles import shipped
from turnwise.ext.research.corpus.retrieval_server import make_app
from turnwise.ext.sandbox.pool import PoolSettings, SandboxPool
from turnwise.ext.sandbox.server import ServerSettings
from turnwise.ext.sandbox.server import make_app as make_sandbox
from turnwise.ext.verl.tools import as_verl_result, function_tools, verl_tool
from turnwise.rollout.tools.tool import ToolContext
from turnwise.system.plugins import load, load_module
from turnwise.types import Message, Role, Sample, ToolResult

SCHEMA = {
    "type": "function",
    "function": {
        "name": "calc_gsm8k_reward",
        "description": "A tool for calculating the reward of gsm8k",
        "parameters": {
            "type": "object",
            "properties": {
                "answer": {"type": "string", "description": "The answer"},
                "notes": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer"}}}},
            },
            "required": ["answer"],
        },
    },
}
LEGACY = """
from typing import Any, Optional
from uuid import uuid4
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.reward_score import gsm8k
from verl.utils.rollout_trace import rollout_trace_op


class Checker(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.alive = {}
        self.seen = []

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs):
        self.seen.append(("create", sorted(kwargs), ground_truth))
        instance_id = instance_id or str(uuid4())
        self.alive[instance_id] = (ground_truth, 0.0)
        return instance_id, ToolResponse(text="ready")

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        self.seen.append(("execute", sorted(kwargs)))
        truth, before = self.alive[instance_id]
        reward = gsm8k.compute_score("#### " + parameters["answer"], truth, method="flexible")
        self.alive[instance_id] = (truth, reward)
        return ToolResponse(text=f"{reward}"), 0.0 if reward > before else -0.05, {"n": 1}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        self.seen.append(("calc_reward", sorted(kwargs)))
        return self.alive[instance_id][1]

    async def release(self, instance_id: str, **kwargs) -> None:
        del self.alive[instance_id]
"""
SYNC = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class Plain(BaseTool):
    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate(
            {"type": "function", "function": {"name": "plain", "description": "d", "parameters": {
                "type": "object", "properties": {"xs": {"type": "array", "items": {"type": "integer"}}},
                "required": ["xs"]}}})

    def execute(self, instance_id, parameters, agent_data):
        agent_data.extra_fields.setdefault("sums", []).append(sum(parameters["xs"]))
        return ToolResponse(text=str(agent_data.extra_fields["sums"])), None, None
"""
FUNCTIONS = '''
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse


@function_tool
def add(a: int, b: int = 2):
    """Add numbers.

    Args:
        a: The first.
        b: The second.
    """
    return {"sum": a + b}


@function_tool("minus")
async def subtract(a: int):
    """Take one away.

    Args:
        a: From this.
    """
    return ToolResponse(text=str(a - 1)), 0.5, {"kind": "minus"}


def helper(a):
    return a
'''


def context(**kwargs: Any) -> ToolContext:
    return ToolContext(Sample("a", (), "x"), kwargs)


async def played(tool: Any, given: ToolContext, *calls: dict[str, Any]) -> list[ToolResult]:
    session = await tool.open(given)
    try:
        replies = [await session.call(arguments) for arguments in calls]
        if hasattr(session, "calc_reward"):
            await session.calc_reward()
        return replies
    finally:
        await session.close()


@pytest.fixture
def made(tmp_path: Path) -> Any:
    def make(code: str, name: str, *args: Any) -> Any:
        file = tmp_path / f"{name.lower()}.py"
        file.write_text(code)
        return verl_tool(load(f"{file}:{name}", "tool"), *args)

    return make


def test_a_tool_class_is_created_and_released_around_every_call(made: Any) -> None:
    tool = made(LEGACY, "Checker", {"type": "native"}, SCHEMA)
    given = context(create_kwargs={"ground_truth": "42"}, execute_kwargs={"deep": True})
    replies = asyncio.run(played(tool, given, {"answer": "42"}, {"answer": "42"}))
    assert [(reply.text, reply.score, reply.info) for reply in replies] == [("1.0", 0.0, {"n": 1})] * 2
    assert tool.made.alive == {}
    assert tool.made.seen == [
        ("create", ["create_kwargs"], "42"), ("execute", ["agent_data", "deep"]),
    ] * 2  # fmt: skip
    assert tool.name == "calc_gsm8k_reward"
    assert tool.schema == SCHEMA  # whole: items and nested properties too


def test_a_tool_class_lives_as_long_as_the_episode_when_asked_to(made: Any) -> None:
    tool = made(LEGACY, "Checker", {"type": "native"}, SCHEMA).with_lifecycle(Lifecycle.per_trajectory)
    given = context(create_kwargs={"ground_truth": "42"}, calc_reward_kwargs={"k": 1})
    replies = asyncio.run(played(tool, given, {"answer": "42"}, {"answer": "42"}))
    assert [reply.text for reply in replies] == ["ready\n1.0", "1.0"]
    assert [reply.score for reply in replies] == [0.0, -0.05]  # the second was no better, and the tool could know
    assert tool.made.seen[-1] == ("calc_reward", ["k"]) and len(tool.made.seen) == 4
    assert tool.made.alive == {}


def test_a_synchronous_class_with_its_own_schema_shares_agent_data_between_calls(made: Any) -> None:
    tool = made(SYNC, "Plain", {}, None)
    assert tool.schema["function"]["parameters"]["properties"]["xs"] == {"type": "array", "items": {"type": "integer"}}
    replies = asyncio.run(played(tool, context(), {"xs": [1, 2]}, {"xs": [4]}))
    assert [(reply.text, reply.score) for reply in replies] == [("[3]", None), ("[3, 4]", None)]


def test_what_is_wrong_with_a_class_is_said_when_it_is_made(made: Any, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="Checker has no schema: give a tool_schema in the YAML"):
        made(LEGACY, "Checker", {}, None)
    with pytest.raises(PluginError, match="has no create, execute, calc_reward, release"):
        verl_tool(dict, {})


def test_function_tools_are_found_by_their_file_and_may_return_all_that_verl_takes(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    module = load_module(f"{tmp_path}/functions.py", "tool")
    add, minus = function_tools(module)
    assert [add.name, minus.name] == ["add", "minus"]
    assert add.schema["function"]["parameters"]["required"] == ["a"]
    (reply,) = asyncio.run(played(add, context(), {"a": 1}))
    assert reply.text == '{"sum": 3}'
    (reply,) = asyncio.run(played(minus, context(), {"a": 1}))
    assert (reply.text, reply.score, reply.info) == ("0", 0.5, {"kind": "minus"})


def test_results_of_every_shape_become_results_of_ours() -> None:
    assert as_verl_result(("text",)) == ToolResult("text")
    assert as_verl_result(("text", 1)).score == 1.0
    assert as_verl_result(7).text == "7"
    assert as_verl_result(("text", None, {"bad": object()})).info["metrics"].startswith("{'bad': <object")
    for bad in (("text", float("nan")), ("a", 1, {}, 2), ()):
        with pytest.raises(ToolError):
            as_verl_result(bad)


def test_verls_own_tools_answer_as_they_did(tmp_path: Path) -> None:
    for name in ("verl.tools.gsm8k_tool.Gsm8kTool", "verl.tools.geo3k_tool.Geo3kTool"):
        kind = load(name, "tool")
        tool = verl_tool(kind, {"type": "native"}, SCHEMA).with_lifecycle(Lifecycle.per_trajectory)
        given = context(create_kwargs={"ground_truth": "18"})
        replies = asyncio.run(played(tool, given, {"answer": "17"}, {"answer": "18"}, {"answer": "18"}))
        assert [reply.text for reply in replies] == [
            "Current parsed answer='17' reward=0.0",
            "Current parsed answer='18' reward=1.0",
            "Current parsed answer='18' reward=1.0",
        ]
        assert [reply.score for reply in replies] == [-0.05, 0.0, -0.05]
    with pytest.raises(PluginError, match="needs config.retrieval_service_url"):
        verl_tool(load("verl.tools.search_tool.SearchTool", "tool"), {}, SCHEMA)


def test_stand_ins_are_gone_after_loading_and_never_shadow_a_real_verl(tmp_path: Path) -> None:
    assert importlib.util.find_spec("verl") is None
    real = tmp_path / "site" / "verl"
    (real / "tools").mkdir(parents=True)
    (real / "__init__.py").write_text("")
    (real / "tools" / "__init__.py").write_text("")
    (real / "tools" / "base_tool.py").write_text("class BaseTool:\n    real = True\n")
    (tmp_path / "mine.py").write_text(
        "from verl.tools.base_tool import BaseTool\nfrom verl.interactions.base import BaseInteraction\n"
    )
    sys.path.insert(0, str(tmp_path / "site"))
    try:
        module = load_module(f"{tmp_path}/mine.py", "tool")
        assert module.BaseTool.real  # the real one's
        assert module.BaseInteraction.__module__.startswith("turnwise.")  # it has none of these
        assert [name for name in sys.modules if name.startswith("verl.interactions")] == []
        assert not hasattr(sys.modules["verl"], "interactions")
    finally:
        sys.path.remove(str(tmp_path / "site"))
        for name in [name for name in sys.modules if name.split(".")[0] == "verl"]:
            del sys.modules[name]


def function_schema(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def test_verls_search_tool_asks_a_retrieval_service(serving_in_a_thread: Any) -> None:
    corpus = shipped()

    @contextlib.asynccontextmanager
    async def app() -> AsyncIterator[Any]:
        yield make_app(corpus)

    with serving_in_a_thread(app) as url:
        kind = load("verl.tools.search_tool.SearchTool", "tool")
        config = {"type": "native", "retrieval_service_url": f"{url}/retrieve", "topk": 1, "timeout": 10}
        tool = verl_tool(kind, config, function_schema("search"))
        title = corpus.articles[0].title
        (reply,) = asyncio.run(played(tool, context(), {"query_list": [title, "qqqq"]}))
    found = json.loads(reply.text)["result"]
    assert found.startswith(f"Doc 1 (Title: {title})\n") and found.endswith("\n---\n")
    assert reply.score == 0.0 and reply.info == {"query_count": 2, "total_results": 1, "status": "success"}


def test_verls_sandbox_tool_runs_code_on_our_server(serving_in_a_thread: Any) -> None:
    @contextlib.asynccontextmanager
    async def app() -> AsyncIterator[Any]:
        async with SandboxPool(PoolSettings(preload=(), warm=1)) as pool:
            yield make_sandbox(pool, None, ServerSettings(pool=PoolSettings(preload=(), warm=1)))

    with serving_in_a_thread(app) as url:
        kind = load("verl.tools.sandbox_fusion_tools.SandboxFusionTool", "tool")
        tool = verl_tool(kind, {"sandbox_fusion_url": f"{url}/run_code"}, function_schema("code_interpreter"))
        printed, silent, wrong = asyncio.run(
            played(tool, context(), {"code": "print(6 * 7)"}, {"code": "x = 1"}, {"code": "1 / 0"})
        )
    assert printed.text.strip() == "42" and printed.info == {"status": "Finished"}
    assert silent.text == "no stdout here" and "ZeroDivisionError" in wrong.text


def test_verls_zoom_tool_cuts_out_a_part_of_the_rows_image(tmp_path: Path) -> None:
    picture = PIL.Image.new("RGB", (100, 80), "white")
    picture.putpixel((40, 40), (255, 0, 0))
    picture.save(tmp_path / "a.png")
    kind = load("verl.tools.image_zoom_in_tool.ImageZoomInTool", "tool")
    tool = verl_tool(kind, {"type": "native"}, function_schema("image_zoom_in_tool"))
    given = context(create_kwargs={"image": str(tmp_path / "a.png")})
    zoomed, grown, bad = asyncio.run(
        played(tool, given, {"bbox_2d": [20, 20, 60, 60], "label": "dot"}, {"bbox_2d": [40, 40, 42, 42]},
               {"bbox_2d": [200, 0, 300, 10]})
    )  # fmt: skip
    assert zoomed.text == "Zoomed in on the image to the region [20, 20, 60, 60] with label dot."
    cut = PIL.Image.open(io.BytesIO(base64.b64decode(zoomed.images[0].source.partition(",")[2])))
    assert cut.size == (40, 40) and cut.getpixel((20, 20)) == (255, 0, 0)
    small = PIL.Image.open(io.BytesIO(base64.b64decode(grown.images[0].source.partition(",")[2])))
    assert small.size == (28, 28) and (grown.score, bad.score) == (0.0, -0.05) and "no region" in bad.text


def test_agent_data_has_the_conversation_so_far(tmp_path: Path) -> None:
    code = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Reader(BaseTool):
    async def execute(self, instance_id, parameters, agent_data, **kwargs):
        return ToolResponse(text=" | ".join(f"{one['role']}: {one['content']}" for one in agent_data.messages))
"""
    (tmp_path / "reader.py").write_text(code)
    tool = verl_tool(load(f"{tmp_path}/reader.py:Reader", "tool"), {}, function_schema("reader"))
    said = [Message(Role.USER, "6*7?"), Message(Role.ASSISTANT, "Let me look.")]
    given = dataclasses.replace(context(), messages=said)
    (reply,) = asyncio.run(played(tool, given, {}))
    assert reply.text == "user: 6*7? | assistant: Let me look."
