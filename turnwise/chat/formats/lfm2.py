"""The lfm2 format: a list of calls as Python writes them, between marks.

    <|tool_call_start|>[search(query="tides", limit=3), now()]<|tool_call_end|>

Of LFM2 and LFM2.5. Values are literals; nothing is run (`chat/calls/python_calls.py`).
"""

import re
from collections.abc import Sequence

from turnwise.chat.calls.python_calls import calls_or_problem, written_call
from turnwise.chat.calls.reasoning import ANSWER, CALL_ENDS, STOPS, THINK, UNTHINK, render_thought  # noqa: F401
from turnwise.chat.calls.scanning import FoundCall, Piece, Scanner, any_of, refuse_unless_read_back
from turnwise.types import JsonSchema, Message, ToolCall

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_CLOSES = re.compile(rf"\s*{re.escape(CLOSE)}")
_RECOVERS = re.compile(rf"(?={any_of((OPEN, CLOSE, THINK, UNTHINK))})|\Z")


def parse(text: str, *, turn: int, in_reasoning: bool, tools: Sequence[JsonSchema] = ()) -> Message:
    """The assistant message in a completion's text."""
    return _SCANNER.message(text, turn=turn, in_reasoning=in_reasoning)


def render_call(call: ToolCall) -> str:
    """The text a model writes to make this call."""
    text = f"{OPEN}{written_call(call)}{CLOSE}"
    return refuse_unless_read_back(text, call, parse(text, turn=0, in_reasoning=False).tool_calls, "lfm2")


def render_malformed_call(call: ToolCall) -> str:
    """The call without its last bracket."""
    return render_call(call).removesuffix("]" + CLOSE) + CLOSE


def _read(text: str, mark: re.Match[str], tools: Sequence[JsonSchema]) -> tuple[list[Piece], int]:
    calls, position = calls_or_problem(text, mark.end(), OPEN, _RECOVERS)
    closed = _CLOSES.match(text, position)
    if closed is None and all(call.problem is None for call in calls):
        end = _RECOVERS.search(text, position)
        assert end is not None  # \Z matches at the latest
        return [FoundCall(calls[0].name, {}, f"the list of calls has no {CLOSE}")], end.end()
    return [*calls], closed.end() if closed else position


_SCANNER = Scanner(re.escape(OPEN), _read)
