"""The minimax_m1 format: calls in JSON between tags, one after another.

    <tool_calls>
    {"name": "search", "arguments": {"query": "tides"}}
    {"name": "now", "arguments": {}}
    </tool_calls>

Of MiniMax-M1; M2 writes `minimax`, M3 `minimax_m3`.
"""

from turnwise.chat.calls.json_call_lists import JsonBlock
from turnwise.chat.calls.reasoning import ANSWER as ANSWER
from turnwise.chat.calls.reasoning import CALL_ENDS as CALL_ENDS
from turnwise.chat.calls.reasoning import STOPS as STOPS
from turnwise.chat.calls.reasoning import THINK as THINK
from turnwise.chat.calls.reasoning import UNTHINK as UNTHINK
from turnwise.chat.calls.reasoning import render_thought as render_thought

_BLOCK = JsonBlock("minimax_m1", [("<tool_calls>", "</tool_calls>")], is_list=False)
parse = _BLOCK.parse
render_call = _BLOCK.render_call
render_malformed_call = _BLOCK.render_malformed_call
