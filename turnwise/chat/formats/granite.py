"""The granite format: a list of calls in JSON after a mark.

    <|tool_call|>[{"name": "search", "arguments": {"query": "tides"}}]

Of Granite 3; Granite 4 writes `hermes`. Nothing may follow the calls.
"""

from turnwise.chat.call_lists import JsonBlock
from turnwise.chat.reasoning import ANSWER as ANSWER
from turnwise.chat.reasoning import CALL_ENDS as CALL_ENDS
from turnwise.chat.reasoning import STOPS as STOPS
from turnwise.chat.reasoning import THINK as THINK
from turnwise.chat.reasoning import UNTHINK as UNTHINK
from turnwise.chat.reasoning import render_thought as render_thought

_BLOCK = JsonBlock("granite", [("<|tool_call|>", "")])
parse = _BLOCK.parse
render_call = _BLOCK.render_call
render_malformed_call = _BLOCK.render_malformed_call
