"""From a typed function to a tool's JSON schema, and the check of a call's arguments against it."""

import inspect
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import jsonschema
from pydantic import PydanticUserError, TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticSerializationError
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from turnwise.errors import PluginError, ToolError
from turnwise.types import JsonSchema

_NO_PARAMETERS: JsonSchema = {"type": "object", "properties": {}}


class BadArguments(ToolError):
    """Arguments that do not fit the schema; the text tells the model what to mend."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a function says of itself as a tool."""

    schema: JsonSchema
    """The OpenAI function schema without its envelope: name, description, parameters."""
    context: str | None
    """The parameter that is filled in by us and hidden from the model."""
    readers: dict[str, TypeAdapter[Any]] = field(default_factory=dict)
    """Make of JSON what the annotation promises, such as a pydantic model."""


def read_signature(
    function: Callable[..., Any],
    name: str,
    context_type: type,
    *,
    hidden: Collection[str | None] = (),
    docs: str | None = None,
) -> Signature:
    """The schema of a documented, annotated function; `hidden` parameters are none of the model's.

    `docs` stands for the function's own docstring.
    """
    summary, described = _read_docstring(inspect.getdoc(_routine(function)) if docs is None else inspect.cleandoc(docs))
    if not summary:
        raise PluginError(f"tool {name!r} needs a docstring: it is what the model reads")
    hints = _hints(function, name)
    context = find_context(function, name, context_type)
    hidden = {context, *hidden}
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in hidden]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise PluginError(f"tool {name!r}: parameter {parameter.name!r} must be an ordinary named parameter")
        if parameter.name not in hints:
            raise PluginError(f"tool {name!r}: parameter {parameter.name!r} needs a type annotation")
    stray = [named for named in described if named not in {*hidden, *(p.name for p in parameters)}]
    if stray:
        raise PluginError(f"tool {name!r}: its docstring describes {stray[0]!r}, which is no parameter")
    readers = {p.name: _reader(name, p.name, hints[p.name]) for p in parameters}
    schema = _parameters_schema(name, parameters, readers, described)
    return Signature({"name": name, "description": summary, "parameters": schema}, context, readers)


def check_signature(
    function: Callable[..., Any],
    name: str,
    context: str | None,
    schema: JsonSchema,
    *,
    hidden: Collection[str | None] = (),
) -> None:
    """Refuse a function that cannot take what its hand-written schema promises."""
    hidden = {context, *hidden}
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in hidden]
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise PluginError(f"tool {name!r}: arguments are passed by name, but its function has positional ones")
    promised = parameters_of(schema).get("properties") or {}
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for prop in promised:
            if prop not in named:
                raise PluginError(f"tool {name!r}: its schema has {prop!r}, which its function does not take")
    for p in parameters:
        if p.name in named and p.default is p.empty and p.name not in promised:
            raise PluginError(f"tool {name!r}: its function needs {p.name!r}, which its schema does not have")


def find_context(function: Callable[..., Any], name: str, context_type: type) -> str | None:
    """The parameter annotated with the context type."""
    found = [parameter for parameter, hint in _hints(function, name).items() if hint is context_type]
    if len(found) > 1:
        raise PluginError(f"tool {name!r}: two parameters want the context")
    return found[0] if found else None


def parameters_of(schema: JsonSchema) -> JsonSchema:
    """The JSON schema of the arguments in a tool's schema."""
    parameters: JsonSchema = schema["function"].get("parameters") or _NO_PARAMETERS
    return parameters


def validator_of(schema: JsonSchema, name: str) -> jsonschema.Draft202012Validator:
    """A validator of the arguments; PluginError when the schema itself is wrong or points outside itself."""
    function = schema.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PluginError(f"tool {name!r}: a schema is {{'type': 'function', 'function': {{'name': ...}}}}")
    parameters = parameters_of(schema)
    try:
        jsonschema.Draft202012Validator.check_schema(parameters)
        resolver = Registry().with_resource("", DRAFT202012.create_resource(parameters)).resolver()
        for reference in _references(parameters):
            if not reference.startswith("#"):  # jsonschema would go and fetch it
                raise PluginError(f"tool {name!r}: its schema refers to {reference!r}, outside itself")
            try:
                resolver.lookup(reference)
            except Unresolvable as error:
                raise PluginError(f"tool {name!r}: its schema refers to {reference!r}, which it lacks") from error
    except jsonschema.SchemaError as error:
        raise PluginError(f"tool {name!r}: its parameters are not a JSON schema: {error.message}") from error
    return jsonschema.Draft202012Validator(parameters)


def check_arguments(validator: jsonschema.Draft202012Validator, name: str, arguments: dict[str, Any]) -> None:
    """Raise BadArguments with a text the model can act on."""
    try:
        errors = sorted(validator.iter_errors(arguments), key=lambda error: [str(step) for step in error.path])
    except RecursionError as error:
        raise BadArguments(f"bad arguments for {name}: nested too deeply") from error
    if errors:
        where = ".".join(str(step) for step in errors[0].path)
        raise BadArguments(f"bad arguments for {name}: {where + ': ' if where else ''}{errors[0].message[:300]}")


_TYPES: dict[str, tuple[type, ...]] = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)}


@dataclass(frozen=True, slots=True)
class PlainArguments:
    """A schema that only names types of text, numbers and truth values: most do, and a validator takes its time.

    It says yes to what is plainly right; all else is for the validator to judge.
    """

    types: dict[str, tuple[type, ...]]
    required: frozenset[str]

    @classmethod
    def of(cls, parameters: JsonSchema) -> "PlainArguments | None":
        """None for a schema that says more."""
        properties = parameters.get("properties", {})
        spoken = {"type", "description", "default", "title"}
        known = {"type", "properties", "required", "description", "title"}
        if not parameters.keys() <= known or parameters.get("type", "object") != "object":
            return None
        if any(not isinstance(one, dict) or not one.keys() <= spoken for one in properties.values()):
            return None
        kinds = {name: one.get("type") for name, one in properties.items()}
        if not all(isinstance(kind, str) and kind in _TYPES for kind in kinds.values()):
            return None
        return cls({name: _TYPES[kind] for name, kind in kinds.items()}, frozenset(parameters.get("required", ())))

    def fit(self, arguments: dict[str, Any]) -> bool:
        """Whether the arguments are plainly right."""
        types = self.types
        return self.required <= arguments.keys() and all(
            type(value) in types.get(name, ()) for name, value in arguments.items()
        )


class _Untitled(GenerateJsonSchema):
    """Pydantic's schema without a title beside every name: the model reads the name already."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _routine(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, or the `__call__` of an object."""
    return function if inspect.isroutine(function) else type(function).__call__


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(_routine(function), include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError) as error:
        raise PluginError(f"tool {name!r}: cannot resolve its annotations: {error}") from error


def _reader(name: str, parameter: str, hint: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint)
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        why = str(error).splitlines()[0]
        raise PluginError(f"tool {name!r}: no JSON schema for {parameter!r}, {hint!r}: {why}") from error


def _parameters_schema(
    name: str, parameters: list[inspect.Parameter], readers: dict[str, TypeAdapter[Any]], described: dict[str, str]
) -> JsonSchema:
    try:
        made, rest = TypeAdapter.json_schemas(
            [(p.name, "validation", readers[p.name]) for p in parameters], schema_generator=_Untitled
        )
    except PydanticUserError as error:
        raise PluginError(f"tool {name!r}: no JSON schema: {error.message}") from error
    properties: dict[str, Any] = {}
    for p in parameters:
        entry = {key: value for key, value in made[p.name, "validation"].items() if key != "title"}
        if p.name in described:
            entry["description"] = described[p.name]
        if p.default is not p.empty and "default" not in entry:
            entry |= _default(readers[p.name], p.default)
        properties[p.name] = entry
    required = [p.name for p in parameters if p.default is p.empty]
    schema: JsonSchema = {"type": "object", "properties": properties, "required": required}
    if rest.get("$defs"):  # `#/$defs/...` is read from the root
        schema["$defs"] = rest["$defs"]
    return schema


def _default(reader: TypeAdapter[Any], value: Any) -> dict[str, Any]:
    """The default as the model may read and write it; one that the annotation does not allow is not shown."""
    try:
        return {"default": reader.dump_python(reader.validate_python(value), mode="json", warnings="error")}
    except (PydanticSerializationError, ValueError, TypeError):
        return {}


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "$ref" and isinstance(value, str):
                yield value
            else:
                yield from _references(value)
    elif isinstance(schema, list):
        for entry in schema:
            yield from _references(entry)


def _read_docstring(docs: str | None) -> tuple[str, dict[str, str]]:
    """(the text before the sections, a description per parameter of a Google-style `Args:` block)."""
    text = docs or ""
    head = re.split(r"\n(?:Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):[ \t]*\n", f"\n{text}")[0]
    block = re.search(r"(?:\A|\n)(?:Args|Arguments|Parameters):[ \t]*\n((?:[ \t]+.*(?:\n|\Z)|[ \t]*\n)*)", text)
    described: dict[str, str] = {}
    current, depth = None, None
    for line in (block.group(1) if block else "").splitlines():
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        depth = indent if depth is None else depth
        entry = re.match(r"(\w+)[ ]?(?:\([^)]*\))?:[ ]*(.*)", line.strip()) if indent <= depth else None
        if entry:
            current = entry.group(1)
            described[current] = entry.group(2).strip()
        elif current:
            described[current] = f"{described[current]} {line.strip()}".strip()
    return " ".join(head.split()), described
