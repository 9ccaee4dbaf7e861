"""The deepseek_v4 format (DSML): <invoke> tags whose parameters say whether they are text.

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="search">
    <｜DSML｜parameter name="query" string="true">tides</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

Of DeepSeek V4, and of V3.2, whose block is called function_calls. Older ones: `deepseek`.
"""

from turnwise.chat.calls.reasoning import ANSWER, CALL_ENDS, STOPS, THINK, UNTHINK  # noqa: F401
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
