"""The qwen3_coder format: each parameter between tags of its own, one on a line.

    <tool_call>
    <function=search>
    <parameter=query>
    tides
    </parameter>
    </function>
    </tool_call>

Of Qwen3-Coder and Qwen3.5. A call is read without its <tool_call>, which the models forget.
"""

from turnwise.chat.calls.reasoning import ANSWER, CALL_ENDS, STOPS, THINK, UNTHINK  # noqa: F401
from turnwise.chat.calls.tagged_calls import TagGrammar

_GRAMMAR = TagGrammar(
    "qwen3_coder",
    block=[("<tool_call>", "</tool_call>")],
    call=("<function={}>", "</function>"),
    parameter=("<parameter={}>", "</parameter>"),
    trims=True,
    wraps=True,
    stands_alone=True,
)
parse = _GRAMMAR.parse
render_call = _GRAMMAR.render_call
render_malformed_call = _GRAMMAR.render_malformed_call
render_thought = _GRAMMAR.render_thought
