"""The same against verl's own files, where TURNWISE_VERL names a folder with them: `make test-peers`.

They lie there without what verl depends on (Ray, tensordict), so `verl` itself, whose first lines import both, stands as
a bare package over its real modules; a module that needs either is skipped, with its name.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REAL = os.environ.get("TURNWISE_VERL", "")
pytestmark = pytest.mark.skipif(not REAL, reason="TURNWISE_VERL names no folder with verl's files")

PREPARE = """
import asyncio, json, sys, types
package = types.ModuleType("verl")
package.__path__ = [sys.argv[1] + "/verl"]
package.__file__ = sys.argv[1] + "/verl/__init__.py"
sys.modules["verl"] = package
sys.path.insert(0, sys.argv[2])
from turnwise.plugins import load, load_module
from turnwise.rollout.verl_tools import function_tools, verl_tool
from turnwise.rollout.tool_options import ToolOptions
from turnwise.choices import Lifecycle
import test_tools as shared


def need(module):
    try:
        __import__(module)
    except ImportError as error:
        print(f"SKIP {module} needs {error.name}")
        sys.exit(0)


def write(name, code):
    with open(sys.argv[3] + "/" + name, "w") as file:
        file.write(code)
    return sys.argv[3] + "/" + name
"""
SCRIPTS = {
    "a tool class on the real base class": """
need("verl.tools.base_tool")
kind = load(write("checker.py", shared.LEGACY) + ":Checker", "tool")
from verl.tools.base_tool import BaseTool
assert issubclass(kind, BaseTool) and BaseTool.__module__ == "verl.tools.base_tool"
for lifecycle, scores in ((Lifecycle.per_call, [0.0, 0.0]), (Lifecycle.per_trajectory, [0.0, -0.05])):
    tool = verl_tool(kind, {"type": "native"}, shared.SCHEMA, ToolOptions(lifecycle=lifecycle))
    assert tool.schema == shared.SCHEMA
    given = shared.context(create_kwargs={"ground_truth": "42"})
    replies = asyncio.run(shared.played(tool, given, {"answer": "42"}, {"answer": "42"}))
    assert [reply.score for reply in replies] == scores, replies
""",
    "verl's own GSM8K tool": """
need("verl.tools.gsm8k_tool")
kind = load("verl.tools.gsm8k_tool.Gsm8kTool", "tool")
tool = verl_tool(kind, {"type": "native"}, shared.SCHEMA, ToolOptions(lifecycle=Lifecycle.per_trajectory))
replies = asyncio.run(shared.played(
    tool, shared.context(create_kwargs={"ground_truth": "18"}), {"answer": "17"}, {"answer": "18"}, {"answer": "18"}))
assert [reply.text for reply in replies][-1].startswith("Current parsed answer='18' reward=1.0"), replies
assert [reply.score for reply in replies] == [-0.05, 0.0, -0.05]
""",
    "function tools": """
import importlib.util
if importlib.util.find_spec("verl.tools.function_tool") is None:
    print("SKIP this release has no function tools"); sys.exit(0)
tools = function_tools(load_module(write("functions.py", shared.FUNCTIONS), "tool"))
assert [tool.name for tool in tools] == ["add", "minus"]
(reply,) = asyncio.run(shared.played(tools[1], shared.context(), {"a": 1}))
assert (reply.text, reply.score, reply.info) == ("0", 0.5, {"kind": "minus"})
assert sys.modules["verl.tools.function_tool"].FUNCTION_TOOL_REGISTRY["add"].fn is not None
""",
    "an interaction, real or stood in for": """
import os
kind = load("verl.interactions.gsm8k_interaction.Gsm8kInteraction", "interaction")
real = os.path.isdir(sys.argv[1] + "/verl/interactions")
assert kind.__module__.startswith("verl." if real else "turnwise."), kind


async def ask():
    user = kind({"name": "gsm8k"})
    await user.start_interaction("a", ground_truth="42")
    said = [await user.generate_response("a", [{"role": "assistant", "content": text}]) for text in ("#### 1", "#### 42")]
    await user.finalize_interaction("a")
    return [one[:3] for one in said]

wrong = "Your response is incorrect! You need to reflect on your answer and try again."
assert asyncio.run(ask()) == [(False, wrong, 0.0), (True, "Your response is correct!", 1.0)]
""",
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_with_verls_own_files(what: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PREPARE + SCRIPTS[what], REAL, str(HERE), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    if done.stdout.startswith("SKIP"):
        pytest.skip(done.stdout.strip().removeprefix("SKIP "))
