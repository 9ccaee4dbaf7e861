"""The apriel format: a list of calls in JSON between tags.

    <tool_calls>[{"name": "search", "arguments": {"query": "tides"}}]</tool_calls>

Of Apriel 1.5 and 1.6, and of Hunyuan A13B.
"""

from turnwise.chat.calls.json_call_lists import JsonBlock
from turnwise.chat.calls.reasoning import ANSWER, CALL_ENDS, STOPS, THINK, UNTHINK, render_thought  # noqa: F401

_BLOCK = JsonBlock("apriel", [("<tool_calls>", "</tool_calls>")])
parse = _BLOCK.parse
render_call = _BLOCK.render_call
render_malformed_call = _BLOCK.render_malformed_call
