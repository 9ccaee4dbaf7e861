"""The deepseek_v4 format (DSML): <invoke> tags whose parameters say whether they are text.

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="search">
    <｜DSML｜parameter name="query" string="true">tides</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

Of DeepSeek V4, and of V3.2, whose block is called function_calls. Older ones: `deepseek`.
"""

from turnwise.chat.calls.reasoning import ANSWER as ANSWER
from turnwise.chat.calls.reasoning import CALL_ENDS as CALL_ENDS
from turnwise.chat.calls.reasoning import STOPS as STOPS
from turnwise.chat.calls.reasoning import THINK as THINK
from turnwise.chat.calls.reasoning import UNTHINK as UNTHINK
from turnwise.chat.calls.tagged_calls import TagGrammar

_GRAMMAR = TagGrammar(
    "deepseek_v4",
    block=[
        ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    ],
    call=('<｜DSML｜invoke name="{}">', "</｜DSML｜invoke>"),
    parameter=('<｜DSML｜parameter name="{}" string="{}">', "</｜DSML｜parameter>"),
)
parse = _GRAMMAR.parse
render_call = _GRAMMAR.render_call
render_malformed_call = _GRAMMAR.render_malformed_call
render_thought = _GRAMMAR.render_thought
