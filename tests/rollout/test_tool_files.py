"""Files of tools: every kind of entry, options for each, and whatever is wrong is told with its place."""

import json
import sys
from pathlib import Path

import pytest

from turnwise.config import RolloutConfig
from turnwise.config.choices import Keep, Lifecycle
from turnwise.errors import TurnwiseError
from turnwise.rollout.toolbox.files import load_tools, read_tool_file
from turnwise.rollout.toolbox.options import ToolOptions, ToolWithOptions
from turnwise.rollout.toolbox.toolbox import Toolbox

MODULE = '''
from turnwise import ToolClass, tool

def plain(word: str) -> str:
    """Say a word."""
    return word

@tool
def ready(word: str) -> str:
    """Say a word."""
    return word

def bare(word):
    return word

class Mine(ToolClass):
    """Mine."""
    def execute(self, word: str) -> str:
        return word + self.config.get("end", "")

class Verls:
    def __init__(self, config, tool_schema):
        self.config, self.tool_schema = config, tool_schema
    def get_openai_tool_schema(self):
        return self.tool_schema
    async def create(self, instance_id=None, **kwargs):
        return instance_id or "1", None
    async def execute(self, instance_id, parameters, **kwargs):
        return "said", 0.0, {}
    async def calc_reward(self, instance_id, **kwargs):
        return 0.0
    async def release(self, instance_id, **kwargs):
        pass

class Neither:
    pass
'''
SCHEMA = {
    "type": "function",
    "function": {
        "name": "other",
        "description": "Say it.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a file of entries beside the module `own_tools`; the current folder is another."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "own_tools.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_tools", raising=False)

    def made(*entries, **rest) -> Path:
        (tmp_path / "files" / "tools.yaml").write_text(json.dumps({"tools": list(entries), **rest}))
        return tmp_path / "files" / "tools.yaml"

    yield made
    sys.modules.pop("own_tools", None)


def test_every_kind_of_entry_is_a_tool_in_its_order(write):
    path = write(
        {"function": "own_tools.py:plain", "timeout": 3},
        {"function": "own_tools:ready"},
        {"function": "own_tools.bare", "schema": SCHEMA},
        {"class_name": "own_tools.Mine", "config": {"end": "!", "type": "native"}, "lifecycle": "per_call"},
        {"class_name": "own_tools.Verls", "config": {"type": "native"}, "tool_schema": renamed("verls")},
        {"name": "calculate", "keep": "head", "max_reply_tokens": 5},
    )
    found = read_tool_file(path)
    assert [each.name for each in found] == ["plain", "ready", "other", "mine", "verls", "calculate"]
    assert (
        isinstance(found[0], ToolWithOptions) and found[0].options == ToolOptions(timeout=3) and found[0].timeout == 3
    )
    assert found[3].lifecycle is Lifecycle.per_call
    assert found[5].options == ToolOptions(max_reply_tokens=5, keep=Keep.head)
    assert [each.name for each in load_tools(str(path))] == [each.name for each in found]
    box = Toolbox(
        found, RolloutConfig(tool_options={"verls": {"lifecycle": "per_trajectory"}, "mine": {"concurrency": 2}})
    )
    assert (
        box.tools["verls"].lifecycle is Lifecycle.per_trajectory and box.tools["mine"].lifecycle is Lifecycle.per_call
    )


def renamed(name):
    return {**SCHEMA, "function": {**SCHEMA["function"], "name": name}}


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"functoin": "own_tools.py:plain"}, "needs one of class_name, function, mcp, name, not functoin, such as"),
        ("calculate", "needs one of class_name"),
        ({"name": "calculate", "time_out": 3}, "unknown key 'time_out': did you mean 'timeout'"),
        ({"name": "calculate", "timeout": -3}, "timeout must be more than 0"),
        ({"name": "calculat"}, "did you mean 'calculate'"),
        ({"name": "calculate", "lifecycle": "per_call"}, "'calculate' has no lifecycle"),
        ({"name": 3}, "name must be text, not 3"),
        ({"function": "own_tools.py:plian"}, "did you mean 'plain'"),
        ({"function": "own_tools.py:plain", "schema": 3}, "schema must be an OpenAI function schema, not 3"),
        ({"function": "own_tools.py:plain", "schema": {"name": "x"}}, "a schema is {'type': 'function'"),
        ({"function": "own_tools.py:plain", "config": {}}, "unknown key 'config'"),
        ({"class_name": "own_tools.Neither"}, "is not a tool but a class"),
        ({"class_name": "own_tools.plain"}, "own_tools.plain is not a class; an object or a function is `function`"),
        ({"class_name": "own_tools.Mine", "config": 3}, "config must be a mapping, not 3"),
        ({"class_name": "own_tools.Verls", "config": {"type": "nativ"}}, "config.type: unknown type 'nativ'"),
        ({"class_name": "own_tools.Mine", "schema": SCHEMA}, "unknown key 'schema': did you mean 'tool_schema'"),
        ({"mcp": "server"}, "mcp: describe a server as"),
        ({"class_name": "own_tools.Mine", "mcp": {"url": "http://x"}}, "own_tools.Mine would not be asked"),
        ({"class_name": "own_tools.Verls", "config": {"type": "mcp"}}, "mcp must say which server"),
        ({"mcp": {"url": "http://x"}, "time_out": 3}, "unknown key 'time_out': did you mean 'timeout'"),
        ({"mcp": {"url": "http://x"}, "config": {"retries": 3}}, "config: unknown option 'retries'"),
        ({"mcp": {"url": "http://x"}, "config": {"timeout": -1}}, "timeout: Input should be greater than 0"),
    ],
)
def test_an_entry_that_cannot_be_used_is_named_with_its_place(write, entry, problem):
    path = write({"name": "calculate"}, entry)
    with pytest.raises(TurnwiseError) as error:
        read_tool_file(path)
    assert str(error.value).startswith(f"{path}: tools[1]") and problem in str(error.value)
    assert str(error.value).count("tools[1]") == 1


def test_a_file_that_is_none_is_refused(write):
    for text, problem in {"{}": "a non-empty list under the key 'tools'", "tools: {}": "a non-empty list"}.items():
        path = write()
        path.write_text(text)
        with pytest.raises(TurnwiseError, match=problem):
            read_tool_file(path)
    with pytest.raises(TurnwiseError, match="unknown key 'tool'"):
        read_tool_file(write({"name": "calculate"}, tool=[]))
    with pytest.raises(TurnwiseError, match=r"rollout.tools: no file nothing.yaml \(from"):
        load_tools("nothing.yaml")
