"""@tool: what the model is told comes from the signature and the docstring, or from a schema kept as it is."""

import asyncio
import datetime
import enum
import functools
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional

import jsonschema
import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from turnwise.errors import PluginError, ToolError
from turnwise.rollout.tools.calculate import calculate
from turnwise.rollout.tools.tool import ToolContext, as_json, tool
from turnwise.types import Sample


class Color(enum.Enum):
    red = "red"
    blue = "blue"


class Inner(BaseModel):
    title: str
    size: int = 1


class Outer(BaseModel):
    inner: Inner
    others: list[Inner] = []


class Tree(BaseModel):
    name: str
    children: list["Tree"] = []


class Typed(TypedDict):
    a: int


@dataclass
class Plain:
    a: int
    b: str = "x"


def parameters(function):
    return tool(function).schema["function"]["parameters"]


def schema_of(hint, **extra):
    def function(value):
        """Take a value."""

    function.__annotations__["value"] = hint
    if extra:
        function.__defaults__ = (extra["default"],)
    return parameters(function)


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal[1, 2], {"type": "integer", "enum": [1, 2]}),
        (Optional[int], {"anyOf": [{"type": "integer"}, {"type": "null"}]}),  # noqa: UP045
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (datetime.date, {"type": "string", "format": "date"}),
        (Annotated[int, Field(ge=1, description="at least 1")],
         {"type": "integer", "minimum": 1, "description": "at least 1"}),
        (Any, {}),
    ],
    ids=str,
)  # fmt: skip
def test_annotations_become_schemas(hint, schema):
    assert schema_of(hint) == {"type": "object", "properties": {"value": schema}, "required": ["value"]}


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (Outer, {"inner": {"title": "t"}, "others": [{"title": "u", "size": 2}]}, {"inner": {"title": 3}}),
        (list[Outer], [{"inner": {"title": "t"}}], [{"inner": {}}]),
        (Tree, {"name": "a", "children": [{"name": "b"}]}, {"name": "a", "children": [{"nme": "b"}]}),
        (Typed, {"a": 1}, {"a": "one"}),
        (Plain, {"a": 1}, {"b": "x"}),
        (Color, "red", "green"),
        (list[Literal["x"]], ["x"], ["y"]),
        (dict[str, Inner], {"k": {"title": "t"}}, {"k": {}}),
        (Optional[Inner], None, {"size": 1}),  # noqa: UP045
    ],
    ids=str,
)
def test_nested_models_are_checked_to_the_bottom(hint, good, bad):
    schema = schema_of(hint)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid({"value": good})
    assert not validator.is_valid({"value": bad})


def test_a_property_called_title_stays():
    assert set(schema_of(Inner)["$defs"]["Inner"]["properties"]) == {"title", "size"}


def test_defaults_are_shown_and_make_a_parameter_optional():
    def function(a: int, b: int = 3, c: Color = Color.red, d: list[int] | None = None):
        """Do."""

    schema = parameters(function)
    assert schema["required"] == ["a"]
    assert {name: entry.get("default", "none") for name, entry in schema["properties"].items()} == {
        "a": "none", "b": 3, "c": "red", "d": None,
    }  # fmt: skip


def test_a_default_the_annotation_does_not_allow_is_not_shown():
    assert "default" not in schema_of(int, default=None)["properties"]["value"]
    assert schema_of(int, default=None)["required"] == []


def test_docstrings_describe_tool_and_parameters():
    def search(query: str, limit: int = 5, unit: Literal["c", "f"] = "c"):
        """Search the web
        for pages.

        Slow pages are left out.

        Args:
            query (str): what to look for: words,
                or a phrase
            limit: how many

        Returns:
            pages: as text
        """

    made = tool(search).schema["function"]
    assert made["description"] == "Search the web for pages. Slow pages are left out."
    described = {name: entry.get("description") for name, entry in made["parameters"]["properties"].items()}
    assert described == {"query": "what to look for: words, or a phrase", "limit": "how many", "unit": None}


def test_the_decorator_keeps_name_options_and_the_function():
    @tool(name="sum", timeout=3.5, concurrency=2)
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    assert (add.name, add.timeout, add.concurrency) == ("sum", 3.5, 2)
    assert add.schema["function"]["name"] == "sum"
    assert add(2, 3) == 5


def test_the_builtin_tools_schema_is_what_the_tiny_model_was_taught():
    assert calculate.schema == {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Evaluate an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }


def no_docstring(a: int):
    return a


def no_annotation(a):
    """Do."""


def varargs(*a: int):
    """Do."""


def keywords(**a: int):
    """Do."""


def positional(a: int, /):
    """Do."""


def unresolved(a: "Nowhere"):  # noqa: F821
    """Do."""


def unschemed(a: asyncio.Lock):
    """Do."""


def misdescribed(a: int):
    """Do.

    Args:
        b: not there
    """


def two_contexts(a: ToolContext, b: ToolContext):
    """Do."""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (no_docstring, "needs a docstring"),
        (no_annotation, "'a' needs a type annotation"),
        (varargs, "'a' must be an ordinary named parameter"),
        (keywords, "'a' must be an ordinary named parameter"),
        (positional, "'a' must be an ordinary named parameter"),
        (unresolved, "cannot resolve its annotations: name 'Nowhere'"),
        (unschemed, "no JSON schema for 'a'"),
        (misdescribed, "describes 'b', which is not a parameter"),
        (two_contexts, "two parameters want the context"),
    ],
)
def test_functions_that_cannot_be_described_are_refused(function, words):
    with pytest.raises(PluginError, match=words):
        tool(function)


@pytest.mark.parametrize("options", [{"timeout": 0}, {"timeout": -1.0}, {"concurrency": 0}])
def test_impossible_options_are_refused(options):
    with pytest.raises(PluginError, match="timeout must be above 0"):
        tool(**options)(lambda: "")


def call(made, arguments, context=None):
    async def main():
        session = await made.open(context or ToolContext(Sample("s", (), "t"), {"k": 1}))
        return (await session.call(arguments)).text

    return asyncio.run(main())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_context_is_filled_in_and_hidden(kind):
    def sync(question: str, episode: ToolContext) -> str:
        """Ask.

        Args:
            question: the question
            episode: ours
        """
        return f"{question} {episode.sample.id} {episode.kwargs}"

    async def aside(question: str, episode: ToolContext) -> str:
        """Ask."""
        return f"{question} {episode.sample.id} {episode.kwargs}"

    made = tool(sync if kind == "sync" else aside)
    assert list(made.schema["function"]["parameters"]["properties"]) == ["question"]
    assert call(made, {"question": "who"}) == "who s {'k': 1}"
    with pytest.raises(ToolError, match="unknown parameter 'episode'"):
        call(made, {"question": "who", "episode": {}})


def test_objects_and_methods_can_be_tools():
    class Shop:
        def __init__(self, stock):
            self.stock = stock

        def price(self, item: str) -> int:
            """The price of an item."""
            return self.stock[item]

        async def __call__(self, item: str) -> int:
            """The price of an item."""
            return self.stock[item]

    shop = Shop({"egg": 3})
    assert call(tool(shop.price), {"item": "egg"}) == "3"
    assert call(tool(name="shop")(shop), {"item": "egg"}) == "3"
    assert tool(shop).name == "Shop"


def test_a_wrapped_function_keeps_its_signature():
    def log(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    @tool
    @log
    def twice(x: int) -> int:
        """Twice."""
        return 2 * x

    assert list(twice.schema["function"]["parameters"]["properties"]) == ["x"]
    assert call(twice, {"x": 4}) == "8"


def test_values_a_model_cannot_express_in_json_schema_are_still_checked():
    @tool
    def birthday(day: datetime.date) -> str:
        """The weekday."""
        return day.strftime("%A")

    assert call(birthday, {"day": "2024-02-29"}) == "Thursday"
    with pytest.raises(ToolError, match="bad arguments for birthday: day: "):
        call(birthday, {"day": "2023-02-29"})


def test_as_json_takes_numbers_of_other_libraries_and_nothing_else():
    import numpy as np

    assert as_json({"a": np.float32(0.5), "b": [np.int64(3)]}) == {"a": 0.5, "b": [3]}
    assert as_json({"a": np.zeros(3)}) is None
    assert as_json(object()) is None
