"""The granite format: a list of calls in JSON after a mark.

    <|tool_call|>[{"name": "search", "arguments": {"query": "tides"}}]

Of Granite 3; Granite 4 writes `hermes`. Nothing may follow the calls.
"""

from turnwise.chat.calls.json_call_lists import JsonBlock
from turnwise.chat.calls.reasoning import ANSWER as ANSWER
from turnwise.chat.calls.reasoning import CALL_ENDS as CALL_ENDS
from turnwise.chat.calls.reasoning import STOPS as STOPS
from turnwise.chat.calls.reasoning import THINK as THINK
from turnwise.chat.calls.reasoning import UNTHINK as UNTHINK
from turnwise.chat.calls.reasoning import render_thought as render_thought

_BLOCK = JsonBlock("granite", [("<|tool_call|>", "")])
parse = _BLOCK.parse
render_call = _BLOCK.render_call
render_malformed_call = _BLOCK.render_malformed_call
