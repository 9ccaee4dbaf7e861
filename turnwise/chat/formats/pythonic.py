"""The pythonic format: a list of calls as Python writes them, at the beginning of a line.

    [search(query="tides", limit=3), now()]

Of Llama 4, Llama 3.2 and Gemma 3 where their template asks for it, and of ToolACE. Llama 4 may put <|python_start|>
before the list and <|python_end|> after it. Values are literals; nothing is run (`chat/calls/python_calls.py`).
"""

import re
from collections.abc import Sequence

from turnwise.chat.calls.python_calls import OPENING, calls_or_problem, written_call
from turnwise.chat.calls.reasoning import ANSWER, CALL_ENDS, STOPS, THINK, UNTHINK, render_thought  # noqa: F401
from turnwise.chat.calls.scanning import Piece, Scanner, any_of, refuse_unless_read_back
from turnwise.types import JsonSchema, Message, ToolCall

OPEN, CLOSE = "<|python_start|>", "<|python_end|>"
_CLOSES = re.compile(rf"\s*{re.escape(CLOSE)}")
_RECOVERS = re.compile(rf"(?=\n|{any_of((OPEN, CLOSE, THINK, UNTHINK))})|\Z")


def parse(text: str, *, turn: int, in_reasoning: bool, tools: Sequence[JsonSchema] = ()) -> Message:
    """The assistant message in a completion's text."""
    return _SCANNER.message(text, turn=turn, in_reasoning=in_reasoning)


def render_call(call: ToolCall) -> str:
    """The text a model writes to make this call."""
    text = written_call(call)
    return refuse_unless_read_back(text, call, parse(text, turn=0, in_reasoning=False).tool_calls, "pythonic")


def render_malformed_call(call: ToolCall) -> str:
    """The call without its last bracket."""
    return render_call(call)[:-1]


def _read(text: str, mark: re.Match[str], tools: Sequence[JsonSchema]) -> tuple[list[Piece], int]:
    calls, position = calls_or_problem(text, mark.end(), OPEN, _RECOVERS)
    closed = _CLOSES.match(text, position)
    return [*calls], closed.end() if closed else position


_SCANNER = Scanner(rf"{re.escape(OPEN)}|(?:(?m:^)|(?<={UNTHINK}))[ \t]*(?={OPENING})", _read)
