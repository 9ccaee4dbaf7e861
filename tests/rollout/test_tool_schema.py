"""Schemas written by hand: kept to the letter, checked against the function, and refused at once when wrong."""

import asyncio
import copy

import pytest

from turnwise.errors import PluginError, ToolError
from turnwise.rollout.toolbox.schema import ArgumentChecker
from turnwise.rollout.tools.tool import ToolContext, tool
from turnwise.types import Sample

RAW = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "query_list": {
                    "type": "array", "items": {"type": "string"}, "minItems": 1, "default": ["a"], "x-mine": 1,
                },
                "where": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "nested": {"type": "object", "properties": {"deep": {"type": ["integer", "string"]}}},
            },
            "required": ["query_list"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip


def test_a_raw_schema_is_kept_to_the_letter_and_checked_against():
    given = copy.deepcopy(RAW)

    @tool(schema=given)
    def search(query_list, where=None, nested=None):
        return "ok"

    assert search.schema is given and given == RAW
    checker = ArgumentChecker.of(search.schema, search.name)
    checker.check_now({"query_list": ["a"]})
    for bad in ({}, {"query_list": []}, {"query_list": [1]}, {"query_list": ["a"], "more": 1}):
        with pytest.raises(ToolError, match="bad arguments for search"):
            checker.check_now(bad)


def test_a_raw_schema_may_go_with_keyword_arguments():
    @tool(schema=RAW)
    async def search(context: ToolContext, **anything):
        return f"{context.sample.id} {sorted(anything)}"

    async def main():
        session = await search.open(ToolContext(Sample("s", (), "t"), {}))
        return (await session.call({"query_list": ["a"], "where": None})).text

    assert asyncio.run(main()) == "s ['query_list', 'where']"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda other: "", "its schema has 'query_list', which its function does not take"),
        (lambda query_list, where, nested, more: "", "its function needs 'more', which its schema does not have"),
        (lambda query_list, where, nested, /: "", "passed by name"),
    ],
)
def test_a_raw_schema_that_does_not_fit_its_function_is_refused(function, words):
    with pytest.raises(PluginError, match=words):
        tool(schema=RAW)(function)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"name": "f"}, "a schema is"),
        ({"type": "function", "function": {"name": 3}}, "a schema is"),
        ({"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}, "not a JSON schema"),
        (
            {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"$ref": "#/$defs/A"}}}}},
            "refers to '#/\\$defs/A', which it lacks",
        ),
        (
            {"type": "function", "function": {"name": "f", "parameters": {"$ref": "http://example.org/s.json"}}},
            "outside itself",
        ),
    ],
)
def test_wrong_schemas_are_refused_at_once(schema, words):
    with pytest.raises(PluginError, match=words):
        tool(schema=schema)(lambda **a: "")


def test_a_name_that_differs_from_the_schema_is_refused():
    with pytest.raises(PluginError, match="its schema calls it 'search'"):
        tool(name="other", schema=RAW)(lambda **a: "")
