"""The minimax_m1 format: calls in JSON between tags, one after another.

    <tool_calls>
    {"name": "search", "arguments": {"query": "tides"}}
    {"name": "now", "arguments": {}}
    </tool_calls>

Of MiniMax-M1; M2 writes `minimax`, M3 `minimax_m3`.
"""

from turnwise.chat.calls.json_call_lists import JsonBlock
from turnwise.chat.calls.reasoning import ANSWER, CALL_ENDS, STOPS, THINK, UNTHINK, render_thought  # noqa: F401

_BLOCK = JsonBlock("minimax_m1", [("<tool_calls>", "</tool_calls>")], is_list=False)
parse = _BLOCK.parse
render_call = _BLOCK.render_call
render_malformed_call = _BLOCK.render_malformed_call
