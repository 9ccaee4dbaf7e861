"""The phi4_mini format: a list of calls in JSON after a word at the beginning of a line, or between marks.

    functools[{"name": "search", "arguments": {"query": "tides"}}]
    <|tool_call|>[{"name": "search", "arguments": {"query": "tides"}}]<|/tool_call|>

Of Phi-4-mini: vLLM's template asks for the first, the model's own marks are the second. The first is written. That
template shows earlier calls as bare objects, which are read as `llama3_json` reads them.
"""

import re
from collections.abc import Sequence

from turnwise.chat.calls.json_call_lists import JsonBlock
from turnwise.chat.calls.reasoning import ANSWER, CALL_ENDS, STOPS, THINK, UNTHINK, render_thought  # noqa: F401
from turnwise.chat.calls.scanning import Piece, Scanner, refuse_unless_read_back
from turnwise.chat.formats.llama3_json import LINE, read_objects
from turnwise.types import JsonSchema, Message, ToolCall

WORD, OPEN, CLOSE = "functools", "<|tool_call|>", "<|/tool_call|>"
_BLOCK = JsonBlock("phi4_mini", [(WORD, ""), (OPEN, CLOSE)])
render_malformed_call = _BLOCK.render_malformed_call


def parse(text: str, *, turn: int, in_reasoning: bool, tools: Sequence[JsonSchema] = ()) -> Message:
    """The assistant message in a completion's text."""
    return _SCANNER.message(text, turn=turn, in_reasoning=in_reasoning)


def render_call(call: ToolCall) -> str:
    """The text a model writes to make this call."""
    text = _BLOCK.render_call(call)
    return refuse_unless_read_back(text, call, parse(text, turn=0, in_reasoning=False).tool_calls, "phi4_mini")


def _read(text: str, mark: re.Match[str], tools: Sequence[JsonSchema]) -> tuple[list[Piece], int]:
    return (_BLOCK.read if mark.group() in (WORD, OPEN) else read_objects)(text, mark, tools)


_SCANNER = Scanner(rf"(?:(?m:^)|(?<={UNTHINK})){WORD}(?=\s*\[)|{re.escape(OPEN)}|{LINE}", _read)
