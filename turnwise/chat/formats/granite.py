"""The granite format: a list of calls in JSON after a mark.

    <|tool_call|>[{"name": "search", "arguments": {"query": "tides"}}]

Of Granite 3; Granite 4 writes `hermes`. Nothing may follow the calls.
"""

from turnwise.chat.calls.json_call_lists import JsonBlock
from turnwise.chat.calls.reasoning import ANSWER, CALL_ENDS, STOPS, THINK, UNTHINK, render_thought  # noqa: F401

_BLOCK = JsonBlock("granite", [("<|tool_call|>", "")])
parse = _BLOCK.parse
render_call = _BLOCK.render_call
render_malformed_call = _BLOCK.render_malformed_call
