"""The apriel format: a list of calls in JSON between tags.

    <tool_calls>[{"name": "search", "arguments": {"query": "tides"}}]</tool_calls>

Of Apriel 1.5 and 1.6, and of Hunyuan A13B.
"""

from turnwise.chat.call_lists import JsonBlock
from turnwise.chat.reasoning import ANSWER as ANSWER
from turnwise.chat.reasoning import CALL_ENDS as CALL_ENDS
from turnwise.chat.reasoning import STOPS as STOPS
from turnwise.chat.reasoning import THINK as THINK
from turnwise.chat.reasoning import UNTHINK as UNTHINK
from turnwise.chat.reasoning import render_thought as render_thought

_BLOCK = JsonBlock("apriel", [("<tool_calls>", "</tool_calls>")])
parse = _BLOCK.parse
render_call = _BLOCK.render_call
render_malformed_call = _BLOCK.render_malformed_call
