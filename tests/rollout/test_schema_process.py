"""Schemas that take for ever over some arguments, or are too large: ended by a clock elsewhere, said in one line."""

import asyncio
import json
import re

import pytest

from turnwise.config import RolloutConfig
from turnwise.errors import PluginError
from turnwise.rollout.toolbox import schema as tool_schema
from turnwise.rollout.toolbox.schema import (
    ArgumentChecker,
    BadArguments,
    CheckTookTooLong,
    SchemaCheckers,
    check_number,
    checkers,
)
from turnwise.rollout.toolbox.toolbox import Toolbox
from turnwise.rollout.tools.tool import FunctionTool
from turnwise.types import CallStatus, Message, Role, Sample, ToolCall


def schema(parameters, name="look"):
    return {"type": "function", "function": {"name": name, "description": "Look.", "parameters": parameters}}


def of(**properties):
    return {"type": "object", "properties": properties}


def doubling(levels):
    """Each definition is tried twice by the one before."""
    refs = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return {**of(a={"$ref": "#/$defs/d0"}), "$defs": {**refs, f"d{levels}": {"type": "string"}}}


EVIL = "a" * 40 + "!"
ENDLESS = {
    "pattern": (of(a={"type": "string", "pattern": "^(a+)+$"}), {"a": EVIL}),
    "patternProperties": ({"type": "object", "patternProperties": {"^(a+)+$": {}}}, {EVIL: 1}),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^(a|a)+$"}}, {EVIL: 1}),
    "references": (doubling(40), {"a": "x"}),
    "uniqueItems": (of(a={"uniqueItems": True}), {"a": [{str(i): i} for i in range(20_000)]}),
    "alternatives": (of(a={"items": {"oneOf": [{"const": str(i)} for i in range(300)]}}), {"a": [[]] * 20_000}),
}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr("turnwise.rollout.toolbox.schema.SECONDS", 0.2)


DEAR = ("patternProperties", "propertyNames", "alternatives")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind in DEAR)) for kind in ENDLESS])
def test_what_never_ends_is_ended_and_nobody_waits_for_it(kind):
    parameters, arguments = ENDLESS[kind]
    slow, quick = ArgumentChecker.of(schema(parameters), "look"), ArgumentChecker.of(schema(doubling(2)), "look")
    order = []

    async def check(checker, value):
        try:
            await checker.check(value)
        except CheckTookTooLong:
            order.append("too long")
        else:
            order.append("fits")

    async def both():
        await asyncio.gather(check(slow, arguments), check(quick, {"a": "b"}))

    asyncio.run(both())
    assert order == ["fits", "too long"]


def run_calls(tools, *calls):
    async def play():
        box = Toolbox(tools, RolloutConfig())
        sample = Sample("a", "test", (Message(Role.USER, "?"),), None)
        opened, records = box.open(sample, list(box.tools)), []
        try:
            return await opened.call(calls, records), records
        finally:
            await opened.close()

    return asyncio.run(play())


def test_the_model_reads_that_its_arguments_could_not_be_checked_and_it_is_counted():
    async def look(a: str) -> str:
        raise AssertionError("it must not be run")

    tool = FunctionTool("look", schema(ENDLESS["pattern"][0]), look, None)
    replies, records = run_calls([tool], ToolCall("c", "look", {"a": EVIL}))
    assert [record.status for record in records] == [CallStatus.TIMEOUT]
    assert replies[0].text == "Error: checking the arguments of look: took longer than 0.2 s"


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (of(a={"description": "x" * 300_000}), "more than 200000 characters"),
        (of(**{f"p{i}": {"type": "string"} for i in range(20_000)}), "more than 200000 characters"),
        (json.loads('{"items":' * 300 + "{}" + "}" * 300), "more than 64 deep"),
        (of(a={"pattern": "(["}), "is not a 'regex'"),
        ({"type": "object", "patternProperties": {"\\p{L}": {}}}, "is not a 'regex'"),
        ([1], "is not a mapping"),
        ({"properties": 5}, "not a JSON schema"),
        (of(a={"$ref": "#/$defs/" + "b" * 500}), "which it lacks"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_used_is_refused_by_name_on_one_line(parameters, words):
    with pytest.raises(PluginError, match=re.escape(words)) as caught:
        ArgumentChecker.of(schema(parameters), "look")
    text = str(caught.value)
    assert text.startswith("tool 'look'") and "\n" not in text and len(text) < 500


def test_a_large_schema_that_takes_too_long_to_read_is_refused(monkeypatch):
    monkeypatch.setattr("turnwise.rollout.toolbox.schema.SECONDS", 10.0)  # CPU time, on a busy machine too
    large = of(**{f"p{i}": {"type": "string", "minLength": 1} for i in range(3_000)})
    ArgumentChecker.of(schema(of(**{f"p{i}": {"type": "string"} for i in range(500)})), "look")
    monkeypatch.setattr("turnwise.rollout.toolbox.schema.SECONDS", 1e-5)
    with pytest.raises(PluginError, match="tool 'look': its schema cannot be checked: took longer than 1e-05 s"):
        ArgumentChecker.of(schema(large), "look")


def test_names_of_properties_and_data_are_no_keywords():
    data = {"$ref": "elsewhere", "pattern": "(["}
    parameters = of(pattern={"type": "string", "default": data, "enum": [data, "x"]}, **{"$ref": {"type": "string"}})
    checker = ArgumentChecker.of(schema(parameters), "look")
    asyncio.run(checker.check({"pattern": "x"}))
    with pytest.raises(BadArguments, match="is not one of"):
        asyncio.run(checker.check({"pattern": "y"}))


def test_the_verdict_is_the_same_wherever_it_is_found(monkeypatch):
    parameters = {**of(a={"type": "array", "items": {"enum": [1, 2]}}, b={"type": "integer"}), "required": ["a"]}
    cases = [{"a": [1, 2]}, {"a": [1, 3]}, {}, {"a": [1], "b": "x"}, {"a": [1], "b": 2}]

    def verdicts():
        checker, found = ArgumentChecker.of(schema(parameters), "look"), []
        for arguments in cases:
            try:
                found.append(asyncio.run(checker.check(arguments)))
            except BadArguments as error:
                found.append(str(error))
        return found

    here = verdicts()
    monkeypatch.setattr(tool_schema, "SMALL", 0)
    assert verdicts() == here and here[0] is None and "3 is not one of [1, 2]" in here[1]


def test_more_tools_than_a_model_can_be_shown_are_refused():
    async def look(a: str) -> str:
        return a

    many = [FunctionTool(f"look{i}", schema(of(), f"look{i}"), look, None) for i in range(1001)]
    with pytest.raises(PluginError, match=r"rollout.tools: 1001 tools; at most 1000"):
        Toolbox(many, RolloutConfig())
    check_number(1000, "rollout.tools")


def test_a_process_that_was_killed_is_replaced_and_none_is_left():
    own = SchemaCheckers()
    try:
        assert own.problem('{"type": "object"}') is None
        own._all[0]._process.kill()
        assert own.problem('{"type": "objekt"}').startswith("its parameters are not a JSON schema")
        process = own._all[0]._process
    finally:
        own.close()
    assert process.returncode is not None and own._all == [] and checkers is not own


@pytest.mark.parametrize("digits", [4000, 5000])
def test_a_number_that_is_too_large_is_told_to_the_model(digits):
    """No fraction can be compared with the first, and Python does not write the second."""
    parameters = {"type": "object", "properties": {"a": {"type": "number", "multipleOf": 0.3}}}
    schema = {"type": "function", "function": {"name": "t", "parameters": parameters}}
    with pytest.raises(BadArguments, match="too large"):
        asyncio.run(ArgumentChecker.of(schema, "t").check({"a": 10**digits}))
