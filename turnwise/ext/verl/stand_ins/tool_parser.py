"""Stand-ins for verl.experimental.agent_loop.tool_parser: its parsers by name, each one of our tool-call formats."""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel

from turnwise.chat.calls.tool_format import load_format

Parser = TypeVar("Parser", bound="type[ToolParser]")


class FunctionCall(BaseModel):
    """A call as it was written: arguments are JSON text."""

    arguments: str
    name: str
    tool_call_id: str | None = None


class ToolParser(ABC):
    """Reads calls out of token ids; subclasses of a user's are registered by name."""

    _registry: ClassVar[dict[str, "type[ToolParser]"]] = {}

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @property
    def stop_token_ids(self) -> list[int]:
        """None: the run's tool-call format ends a turn by its own stops."""
        return []

    @abstractmethod
    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """(the text without calls, the calls that can be read)."""

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> "ToolParser":
        """A parser of the class registered under a name; ValueError where there is none."""
        if name not in cls._registry:
            raise ValueError(f"there is no tool parser {name!r}: {', '.join(cls._registry)}")
        return cls._registry[name](tokenizer)

    @classmethod
    def register(cls, name: str) -> Callable[[Parser], Parser]:
        """Decorates a parser class, which is then found under this name."""

        def decorator(subclass: Parser) -> Parser:
            cls._registry[name] = subclass
            return subclass

        return decorator


class _FormatParser(ToolParser):
    """One of our formats: calls inside a thought are none, and values are typed by the schemas."""

    FORMAT = ""

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        return await asyncio.to_thread(self._extract, responses_ids, tools or ())

    def _extract(self, ids: list[int], tools: Sequence[Any]) -> tuple[str, list[FunctionCall]]:
        schemas = [tool if isinstance(tool, dict) else tool.model_dump(exclude_none=True) for tool in tools]
        call_format = load_format(self.FORMAT)
        text = self.tokenizer.decode(ids[:-1] if ids[-1:] == [self.tokenizer.eos_token_id] else ids)
        message = call_format.parse(text, turn=0, in_reasoning=False, tools=schemas)
        calls = [call for call in message.tool_calls if call.problem is None]
        function_calls = [
            FunctionCall(name=call.name, arguments=json.dumps(call.arguments, ensure_ascii=False)) for call in calls
        ]
        return message.visible, function_calls


def _parser(name: str) -> type[ToolParser]:
    return ToolParser.register(name)(type(f"{name}_parser", (_FormatParser,), {"FORMAT": name}))


HermesToolParser = _parser("hermes")
GptOssToolParser = _parser("gpt-oss")
Qwen3XMLToolParser = _parser("qwen3_coder")
GLMToolParser = _parser("glm")
SeedToolParser = _parser("seed")
MiniMaxToolParser = _parser("minimax")
KimiToolParser = _parser("kimi")
DeepSeekV4ToolParser = _parser("deepseek_v4")
Gemma4ToolParser = _parser("gemma4")
for _name in ("llama3_json", "mistral", "code", "calculator"):  # of ours alone: a loop asks for the run's format
    _parser(_name)
