"""From a typed function to a tool's JSON schema, and the check of a call's arguments against it."""

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import jsonschema
from pydantic import PydanticUserError, TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticSerializationError

from turnwise.errors import PluginError, ToolError
from turnwise.rollout.toolbox import schema_checker
from turnwise.system.children import ClockedProcesses, NoAnswer
from turnwise.types import JsonSchema

_NO_PARAMETERS: JsonSchema = {"type": "object", "properties": {}}
MOST_TOOLS = 1000
"""That one server, file or request may offer: a model is shown every one."""
MOST_CHARACTERS = 200_000
"""Of one schema."""
DEEPEST = 64
SMALL = 8_000
"""Characters of a schema that is checked where it is read."""
QUICK = 500_000
"""Characters of a schema times those of arguments up to which they are compared where they are: a tenth of a second."""
_WATCHED = frozenset({"pattern", "patternProperties", "$ref", "$dynamicRef", "$recursiveRef", "uniqueItems"})
_WATCHED |= {"unevaluatedProperties", "unevaluatedItems", "multipleOf"}
"""Keywords whose time does not just grow with schema and arguments."""
PROCESSES = 2
SECONDS = 1.0
"""CPU time of one check; the honest ones take a thousandth of it."""
QUESTIONS = 100_000
"""Checks after which a process is replaced."""


class CheckTookTooLong(Exception):
    """A check that its clock ended, or that nobody answered."""


class SchemaCheckers(ClockedProcesses):
    """All processes of this one that check schemas: no pattern and no schema holds the run."""

    def __init__(self) -> None:
        super().__init__(Path(__file__).with_name("schema_checker.py"), PROCESSES, QUESTIONS)

    def problem(self, schema: str, **arguments: Any) -> str | None:
        """What is wrong with a schema, or with `arguments` for it; from a thread that may wait."""
        seconds = SECONDS
        try:
            problem: str | None = self.ask({"schema": schema, **arguments}, seconds)["problem"]
        except NoAnswer as error:
            raise CheckTookTooLong(f"took longer than {seconds:g} s" if error.too_much else str(error)) from error
        return problem

    async def problem_soon(self, schema: str, **arguments: Any) -> str | None:
        """The same without holding the event loop."""
        return await asyncio.wrap_future(self.submit(self.problem, schema, **arguments))


checkers = SchemaCheckers()


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
        raise PluginError(f"tool {name!r}: its docstring describes {stray[0]!r}, which is not a parameter")
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
    names = [parameter for parameter, hint in _hints(function, name).items() if hint is context_type]
    if len(names) > 1:
        raise PluginError(f"tool {name!r}: two parameters want the context")
    return names[0] if names else None


def parameters_of(schema: JsonSchema) -> JsonSchema:
    """The JSON schema of the arguments in a tool's schema."""
    parameters: JsonSchema = schema["function"].get("parameters") or _NO_PARAMETERS
    return parameters


def check_size(schema: Any, name: str) -> int:
    """The characters of a schema, about; PluginError for one that is too large or too deep to be shown to a model."""
    size, waiting = 0, [(schema, 0)]
    while waiting:
        value, depth = waiting.pop()
        if depth > DEEPEST:
            raise PluginError(f"tool {name!r:.80}: its schema is nested more than {DEEPEST} deep")
        if isinstance(value, dict):
            size += sum(len(key) for key in value if isinstance(key, str)) + 4 * len(value)
            waiting += [(entry, depth + 1) for entry in value.values()]
        elif isinstance(value, list):
            size += 2 * len(value)
            waiting += [(entry, depth + 1) for entry in value]
        else:
            size += len(value) if isinstance(value, str) else 8
        if size > MOST_CHARACTERS:
            raise PluginError(f"tool {name!r:.80}: its schema has more than {MOST_CHARACTERS} characters")
    return size


def check_number(tools: int, whose: str) -> None:
    """PluginError for more tools than a model can be shown."""
    if tools > MOST_TOOLS:
        raise PluginError(f"{whose}: {tools} tools; at most {MOST_TOOLS} are taken, so choose among them")


@dataclass(frozen=True, slots=True)
class ArgumentChecker:
    """What arguments of one tool must be: `await checker.check({"city": "Rome"})`.

    A schema that could take long over some arguments (patterns, references, what is compared with all others) or that
    is large is asked in a process of its own, with a limit of time.
    """

    name: str
    text: str
    """The schema of the arguments, as JSON."""
    plain: "PlainArguments | None"
    validator: jsonschema.Draft202012Validator | None
    """None for a schema that is only checked elsewhere."""

    @classmethod
    def of(cls, schema: JsonSchema, name: str) -> "ArgumentChecker":
        """PluginError when the schema itself is wrong, too large, takes too long or points outside itself."""
        function = schema.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise PluginError(f"tool {name!r}: a schema is {{'type': 'function', 'function': {{'name': ...}}}}")
        size, parameters = check_size(schema, name), parameters_of(schema)
        try:
            text = json.dumps(parameters)
            problem = schema_checker.schema_problem(parameters) if size <= SMALL else checkers.problem(text)
        except (CheckTookTooLong, TypeError, ValueError) as error:
            raise PluginError(f"tool {name!r}: its schema cannot be checked: {error}") from error
        if problem is not None:
            raise PluginError(f"tool {name!r}: {problem}")
        is_watched = size > SMALL or _has_watched(parameters)
        validator = None if is_watched else schema_checker.validator_of(parameters)
        return cls(name, text, PlainArguments.of(parameters), validator)

    def fits_plainly(self, arguments: dict[str, Any]) -> bool:
        """Whether the arguments are right at a glance."""
        return self.plain is not None and self.plain.fit(arguments)

    async def check(self, arguments: dict[str, Any]) -> None:
        """Raise BadArguments with a text the model can act on; CheckTookTooLong when nobody knows in time."""
        if self.fits_plainly(arguments):
            return
        if self._is_quick(arguments):
            self.check_now(arguments)
        else:
            self._judge(await checkers.problem_soon(self.text, arguments=arguments))

    def check_now(self, arguments: dict[str, Any]) -> None:
        """Checks arguments as `check` does, but blocks: for callers that may wait."""
        if self.validator is not None and self._is_quick(arguments):
            self._judge(schema_checker.argument_problem(self.validator, arguments))
        else:
            self._judge(checkers.problem(self.text, arguments=arguments))

    def _is_quick(self, arguments: dict[str, Any]) -> bool:
        try:
            size = len(json.dumps(arguments))
        except RecursionError as error:
            raise BadArguments(f"bad arguments for {self.name}: {schema_checker.TOO_DEEP}") from error
        except ValueError as error:  # of more digits than Python writes
            raise BadArguments(f"bad arguments for {self.name}: it has a number that is too large") from error
        return self.validator is not None and len(self.text) * size <= QUICK

    def _judge(self, problem: str | None) -> None:
        if problem is not None:
            raise BadArguments(f"bad arguments for {self.name}: {problem}")


def check_schema(schema: JsonSchema, name: str) -> None:
    """PluginError when a tool's schema is wrong or points outside itself."""
    ArgumentChecker.of(schema, name)


def _has_watched(value: Any) -> bool:
    if isinstance(value, dict):
        return not _WATCHED.isdisjoint(value) or any(_has_watched(entry) for entry in value.values())
    return isinstance(value, list) and any(_has_watched(entry) for entry in value)


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
        allowed = {"type", "properties", "required", "description", "title"}
        if not parameters.keys() <= allowed or parameters.get("type", "object") != "object":
            return None
        if any(not isinstance(entry, dict) or not entry.keys() <= spoken for entry in properties.values()):
            return None
        kinds = {name: entry.get("type") for name, entry in properties.items()}
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
        schemas, rest = TypeAdapter.json_schemas(
            [(p.name, "validation", readers[p.name]) for p in parameters], schema_generator=_Untitled
        )
    except PydanticUserError as error:
        raise PluginError(f"tool {name!r}: no JSON schema: {error.message}") from error
    properties: dict[str, Any] = {}
    for p in parameters:
        entry = {key: value for key, value in schemas[p.name, "validation"].items() if key != "title"}
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
