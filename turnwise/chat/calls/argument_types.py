"""Values that a model wrote without quotes, read as the tool's schema says.

A value whose schema is a text is taken as it stands. Others are JSON where they are valid JSON of a type that the
schema allows, else text. Without a schema: JSON if it parses, else text.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from turnwise.chat.calls.json_calls import load
from turnwise.types import JsonSchema

_TYPES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null",
}  # fmt: skip
_WORDS = {"true": True, "false": False, "none": None, "null": None}
"""As models that learnt from Python write them; by their lower case."""
_DEEPEST_SCHEMA = 16


def typed(name: str, written: dict[str, str], tools: Sequence[JsonSchema]) -> dict[str, Any]:
    """The arguments of a call of tool `name`."""
    parameters = parameters_of(name, tools)
    properties = parameters.get("properties") or {}
    return {key: typed_value(text, types_of(properties.get(key), parameters)) for key, text in written.items()}


def typed_value(text: str, types: frozenset[str]) -> Any:
    """One value; no types: nothing is known of it."""
    if types == {"string"}:
        return text
    word = text.strip().lower()
    if word in _WORDS and types and _TYPES[type(_WORDS[word])] in types:
        return _WORDS[word]
    try:
        value = load(text)
    except (ValueError, RecursionError):
        return text
    kind = _TYPES[type(value)]
    fits = not types or kind in types or (kind == "integer" and "number" in types) or (
        kind == "number" and "integer" in types
    )  # fmt: skip
    return value if fits and (kind != "string" or not types) else text


def types_of(schema: Any, parameters: JsonSchema) -> frozenset[str]:
    """The JSON types that a property's schema allows; none when it does not say."""
    return frozenset(_types(schema, parameters, 0))


def _types(schema: Any, parameters: JsonSchema, depth: int) -> Iterator[str]:
    if not isinstance(schema, dict) or depth > _DEEPEST_SCHEMA:
        return
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, list):
        yield from (option for option in declared if isinstance(option, str))
    elif "enum" in schema or "const" in schema:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
        yield from (_TYPES[type(value)] for value in values if type(value) in _TYPES)
    for key in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(key) or () if isinstance(schema.get(key), list) else ():
            yield from _types(option, parameters, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        section, _, name = reference.removeprefix("#/").rpartition("/")
        definitions = parameters.get(section)
        yield from _types(definitions.get(name) if isinstance(definitions, dict) else None, parameters, depth + 1)


def parameters_of(name: str, tools: Sequence[JsonSchema]) -> JsonSchema:
    """The schema of a tool's parameters; nothing when there is no such tool."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, dict) else {}
    return {}
