"""Calls written in every format and read back: the same call, or a refusal; never another one."""

import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from turnwise.chat.calls.argument_types import typed
from turnwise.chat.calls.tool_format import ToolFormat, load_format
from turnwise.errors import TemplateError
from turnwise.system.plugins import names_in
from turnwise.types import ToolCall

SPECIAL = ("code", "calculator")
"""Formats of one tool; the others write calls of any."""
NAMES = [name for name in names_in("turnwise.chat.formats") if name not in SPECIAL]
HOSTILE = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>", "</function>",
    "<parameter=x>", "</parameter>",
    "<arg_key>", "</arg_value>", "<|channel|>commentary to=functions.g<|message|>{}<|call|>",
    "<|end|>", "<|start|>assistant",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>", "```", "```json", "<｜DSML｜invoke name=\"g\">",
    "</｜DSML｜parameter>",
    "<minimax:tool_call>", "</invoke>", "<seed:tool_call>", "<|tool_call>", "<tool_call|>",
    '<|"|>', "<channel|>", "[TOOL_CALLS]",
    "]<]minimax[>[", "]<]minimax[>[</x>", "</mm:think>", "<tool_calls>", "</tool_calls>", "<|tool_call|>",
    "<|tool_call_end|>", "functools[", "[g(x=1)]", "\n[g(x=1)]\n", "<|python_end|>", ")]", "\\'", "'''",
    "[ARGS]", "[THINK]", "<|python_tag|>", '{"name": "g", "parameters": {}}', "\n", "\r\n", "\t",
    '"', "\\", "'", "{", "}", "[",
    "]", ",", ":", "42", "-1.5", "true", "None", "null", "naïve 東京 🙂", " ", "\u2028", "\x00",
)  # fmt: skip
texts = st.lists(
    st.sampled_from(HOSTILE) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=4
).map("".join)
values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def schema(arguments: dict[str, Any]) -> dict[str, Any]:
    properties = {key: {"type": TYPES[type(value)]} for key, value in arguments.items()}
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(arguments=st.dictionaries(st.sampled_from(["x", "y_2", "z"]), values, max_size=3), around=texts)
@example(arguments={"x": "42", "y_2": 42, "z": "true"}, around="")
@example(arguments={"x": "\n", "y_2": "\na\n", "z": " a "}, around="")
@example(arguments={"x": ""}, around="")
@example(arguments={"x": {">": None, ">}": [">"]}}, around="")
def test_calls_are_read_back_or_refused(name: str, arguments: dict[str, Any], around: str) -> None:
    form, call = load_format(name), ToolCall("t000c0000", "f", arguments)
    try:
        text = form.render_call(call)
    except TemplateError as error:
        spelled = json.dumps(arguments, ensure_ascii=False)
        assert f"chat.tool_format={name}" in str(error)
        assert any(mark in spelled for mark in ("<", "｜")), "only what spells a mark may be refused"
        return
    (read,) = form.parse(text, turn=0, in_reasoning=False, tools=[schema(arguments)]).tool_calls
    assert (read.name, read.arguments, read.problem) == ("f", arguments, None)
    assert [type(value) for value in read.arguments.values()] == [type(value) for value in arguments.values()]
    broken = form.parse(form.render_malformed_call(call), turn=0, in_reasoning=False, tools=[]).tool_calls
    assert all(one.problem and not one.arguments for one in broken)
    assert broken or (name == "hermes" and "</think>" in text), "where its strings are not sure, it was a thought"
    thought = form.render_thought("hm", is_open=False)
    both = form.parse(f"{thought}{text}\n{text}", turn=0, in_reasoning=False, tools=[schema(arguments)])
    assert [one.arguments for one in both.tool_calls] == [arguments, arguments] and both.reasoning == "hm"
    form.parse(around + text + around, turn=0, in_reasoning=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tool", ["", "a b", 'a"b', "a<b", "a\nb", "f>", "{f}"])
def test_a_name_that_would_be_read_as_another_is_refused(name: str, tool: str) -> None:
    form, call = load_format(name), ToolCall("t000c0000", tool, {"x": 1})
    if name == "hermes":  # any name can stand in its JSON
        return
    try:
        read = form.parse(form.render_call(call), turn=0, in_reasoning=False).tool_calls
    except TemplateError:
        return
    assert [(one.name, one.problem) for one in read] == [(tool, None)]


@pytest.mark.parametrize("name", NAMES)
def test_every_beginning_of_a_call_is_no_call_or_has_a_problem(name: str) -> None:
    form = load_format(name)
    text = form.render_call(ToolCall("t000c0000", "search", {"query": "tides", "limit": 3, "deep": {"a": [1, "b"]}}))
    tail = {"kimi": "<|tool_calls_section_end|>", "deepseek": "<｜tool▁calls▁end｜>"}.get(name, "")
    for end in range(len(text) - len(tail)):
        for call in form.parse(text[:end], turn=0, in_reasoning=False).tool_calls:
            assert call.problem and not call.arguments, text[:end]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("calculator", ToolCall("", "calculate", {"expression": "1>>2"})),
        ("calculator", ToolCall("", "calculate", {"expression": "1<<2"})),
        ("code", ToolCall("", "python", {"code": "print('</code>')"})),
        ("code", ToolCall("", "python", {"code": "print('<answer>')"})),
        ("qwen3_coder", ToolCall("", "f", {"x": "a</parameter>b"})),
        ("glm", ToolCall("", "f", {"x": "a</tool_call>b"})),
        ("gemma", ToolCall("", "f", {"x": '<|"|>'})),
        ("minimax", ToolCall("", "f", {'a"b': 1})),
    ],
)
def test_what_would_become_another_call_is_refused(name: str, call: ToolCall) -> None:
    with pytest.raises(TemplateError, match=f"chat.tool_format={name}"):
        load_format(name).render_call(call)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_are_none_are_refused(name: str) -> None:
    form: ToolFormat = load_format(name)
    if name == "hermes":
        return
    for value in (math.nan, math.inf):
        read: Any = ()
        try:
            read = form.parse(form.render_call(ToolCall("", "f", {"x": value})), turn=0, in_reasoning=False).tool_calls
        except TemplateError:
            continue
        assert read[0].arguments["x"] != value, "a text at most"


@pytest.mark.parametrize(
    ("said", "text", "value"),
    [
        ({"type": "string"}, "42", "42"),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "42", 42),
        ({"type": "integer"}, "forty", "forty"),
        ({"type": "number"}, "42", 42),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "1", "1"),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "integer"]}, "42", 42),
        ({"type": ["string", "integer"]}, '"42"', '"42"'),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "array"}, "[1, 2", "[1, 2"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"$ref": "#/$defs/Kind"}, "7", "7"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({}, "42", 42),
        ({}, "True", "True"),
        ({}, '"42"', "42"),
        ({}, "1e999", "1e999"),
        ({"type": 7}, "42", 42),
        (None, "plain", "plain"),
    ],
)
def test_values_without_quotes_are_what_the_schema_says(said: Any, text: str, value: Any) -> None:
    parameters = {"properties": {"x": said}, "$defs": {"Kind": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    read = typed("f", {"x": text}, [tool])["x"]
    assert read == value and type(read) is type(value)
