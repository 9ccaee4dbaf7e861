"""The minimax format: <invoke> tags with names as attributes, several in one block.

    <minimax:tool_call>
    <invoke name="search">
    <parameter name="query">tides</parameter>
    </invoke>
    </minimax:tool_call>

Of MiniMax-M1 and M2.
"""

from turnwise.chat.calls.reasoning import ANSWER, CALL_ENDS, STOPS, THINK, UNTHINK  # noqa: F401
from turnwise.chat.calls.tagged_calls import TagGrammar

_GRAMMAR = TagGrammar(
    "minimax",
    block=[("<minimax:tool_call>", "</minimax:tool_call>")],
    call=('<invoke name="{}">', "</invoke>"),
    parameter=('<parameter name="{}">', "</parameter>"),
)
parse = _GRAMMAR.parse
render_call = _GRAMMAR.render_call
render_malformed_call = _GRAMMAR.render_malformed_call
render_thought = _GRAMMAR.render_thought
