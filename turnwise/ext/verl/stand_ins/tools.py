"""Stand-ins for verl.tools: the base class, the schemas, the registry and @function_tool."""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, field_validator

from turnwise.config.strict_yaml import read_yaml
from turnwise.errors import ConfigError, PluginError
from turnwise.rollout.tools.tool import tool as our_tool
from turnwise.system.plugins import load, load_module


class _Open(BaseModel):
    """Keywords of JSON Schema that verl's classes do not name (items, nested properties) are kept, where it drops
    them."""

    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Open):
    """The schema of one parameter of a function."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_Open):
    """The schema of all parameters of a function."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(_Open):
    """The schema of a function: its name, description and parameters."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False


class OpenAIFunctionToolSchema(_Open):
    """The schema of a tool, in the form of the OpenAI API."""

    type: str = "function"
    function: OpenAIFunctionSchema


class OpenAIFunctionParsedSchema(BaseModel):
    """A call as it was written: arguments are JSON text."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A call of a function with its arguments as they were read."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> "tuple[OpenAIFunctionCallSchema, bool]":
        """(the call, whether its arguments could not be read; they are empty then)."""
        try:
            arguments = json.loads(parsed_schema.arguments)
        except json.JSONDecodeError:
            arguments = None
        bad = not isinstance(arguments, dict)
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments={} if bad else arguments), bad


class OpenAIFunctionToolCall(BaseModel):
    """A tool call with its id."""

    id: str
    type: Literal["function"] = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(BaseModel):
    """What a tool replies: text, images or videos."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @field_validator("image", "video", mode="before")
    @classmethod
    def _is_list(cls, value: Any) -> Any:
        if not isinstance(value, list):
            raise ValueError(f"must be a list, not {type(value).__name__}; wrap a single one: [image]")
        return value

    def is_empty(self) -> bool:
        """Whether the response has no text, image or video."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Whether it is text and nothing else."""
        return bool(self.text) and not (self.image or self.video)


class BaseTool:
    """The base class of verl's tools: subclasses override what they need."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        self.tool_schema: OpenAIFunctionToolSchema | None = tool_schema
        if tool_schema is None:
            self.tool_schema = self.get_openai_tool_schema()
        if self.tool_schema is None:
            kind = type(self).__name__
            raise PluginError(f"{kind} has no schema: give a tool_schema in the YAML, or write get_openai_tool_schema")
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """The schema of this tool, in the form of the OpenAI API."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin; gives the id of the instance and what the model may read of it."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """One call: (response, reward, metrics)."""
        raise NotImplementedError(f"{type(self).__name__} must implement execute")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """What the instance is worth at the end of an episode."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Frees what the instance holds; does nothing unless a subclass overrides it."""


# --- the registry --------------------------------------------------------------------------------------------------


class ToolType(Enum):
    """Where a tool of a YAML file runs."""

    NATIVE = "native"
    MCP = "mcp"


def get_tool_class(cls_name: str) -> Any:
    """The tool class that a dotted name stands for."""
    return load(cls_name, "tool")


def initialize_tools_from_config(tools_config_file: str | Path) -> list[Any]:
    """The native tools of a YAML file, made. A run needs none of this: rollout.tools takes the file itself."""
    path = Path(tools_config_file)
    content = read_yaml(path)
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: expected a list under the key 'tools'")
    tools = []
    for number, entry in enumerate(entries):
        if ToolType(entry["config"]["type"]) is not ToolType.NATIVE:
            raise ConfigError(f"{path}: tools[{number}] is an MCP server: name the file in rollout.tools instead")
        schema = entry.get("tool_schema")
        validated = None if schema is None else OpenAIFunctionToolSchema.model_validate(schema)
        kind = load(entry["class_name"], "tool", near=path.resolve().parent)
        tools.append(kind(config=entry["config"], tool_schema=validated))
    return tools


def load_all_tools(tool_config_path: str | None, function_tool_path: str | None) -> list[Any]:
    """Tools of both kinds; two of one name are refused."""
    tools = [] if tool_config_path is None else initialize_tools_from_config(tool_config_path)
    tools += [] if function_tool_path is None else load_function_tools_from_path(function_tool_path)
    names = [tool.name for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two tools are called {', '.join(twice)}")
    return tools


# --- function tools ------------------------------------------------------------------------------------------------

FUNCTION_TOOL_REGISTRY: "dict[str, RegisteredFunction]" = {}
"""By name, in the order of their decoration."""


@dataclass
class RegisteredFunction:
    """A function that @function_tool has made a tool."""

    name: str
    fn: Callable[..., Any]
    tool_schema: OpenAIFunctionToolSchema
    is_async: bool = False


FunctionTool = RegisteredFunction
"""Its name in verl."""


def function_tool(name: Any = None, *, schema: OpenAIFunctionToolSchema | dict[str, Any] | None = None) -> Any:
    """Decorate a function: `@function_tool`, `@function_tool("name")` or with `schema=`."""
    if callable(name) and schema is None:
        return _register(name, None, None)
    return lambda function: _register(function, name, schema)


def _register(function: Callable[..., Any], name: str | None, schema: Any) -> Callable[..., Any]:
    called = name or function.__name__
    if schema is None:
        variadic = [p.name for p in inspect.signature(function).parameters.values()
                    if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]  # fmt: skip
        if variadic:
            raise ValueError(f"@function_tool {called!r}: {', '.join(variadic)} cannot be put into a schema; name them")
        schema = our_tool(name=called)(function).schema
    if isinstance(schema, dict):
        schema = OpenAIFunctionToolSchema.model_validate(schema)
    earlier = FUNCTION_TOOL_REGISTRY.get(called)
    if earlier is not None and _place(earlier.fn) != _place(function):
        raise ValueError(f"two function tools are called {called!r}: {_place(earlier.fn)} and {_place(function)}")
    FUNCTION_TOOL_REGISTRY[called] = RegisteredFunction(called, function, schema, inspect.iscoroutinefunction(function))
    return function


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def get_function_tool(name: str) -> RegisteredFunction:
    """The decorated function of a name."""
    if name not in FUNCTION_TOOL_REGISTRY:
        raise KeyError(f"no function tool is called {name!r}")
    return FUNCTION_TOOL_REGISTRY[name]


def load_function_tools_from_path(path: str) -> list[RegisteredFunction]:
    """The function tools that a Python file defines."""
    module = load_module(path, "tool")
    return [entry for entry in FUNCTION_TOOL_REGISTRY.values() if entry.fn.__module__ == module.__name__]


def normalize_function_tool_return(ret: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
    """(response, reward, metrics) of whatever a function tool returned."""
    parts = ret if isinstance(ret, tuple) else (ret,)
    if not 1 <= len(parts) <= 3:
        raise TypeError(f"a function tool returns one to three values, not {len(parts)}")
    response, reward, metrics = (*parts, None, None)[:3]
    if not isinstance(response, ToolResponse):
        text = json.dumps(response, ensure_ascii=False) if isinstance(response, dict) else str(response)
        response = ToolResponse(text=text)
    return response, 0.0 if reward is None else float(reward), dict(metrics or {})
