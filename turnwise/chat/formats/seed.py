"""The seed format: the tags of qwen3_coder inside a block of its own, values in one line with their tags.

    <seed:tool_call>
    <function=search>
    <parameter=query>tides</parameter>
    </function>
    </seed:tool_call>

Of Seed-OSS; its thoughts stand between <seed:think> tags.
"""

from turnwise.chat.calls.reasoning import ANSWER, CALL_ENDS, STOPS  # noqa: F401
from turnwise.chat.calls.tagged_calls import TagGrammar

THINK, UNTHINK = "<seed:think>", "</seed:think>"
_GRAMMAR = TagGrammar(
    "seed",
    block=[("<seed:tool_call>", "</seed:tool_call>")],
    call=("<function={}>", "</function>"),
    parameter=("<parameter={}>", "</parameter>"),
    thoughts=(THINK, UNTHINK),
    trims=True,
    stands_alone=True,
)
parse = _GRAMMAR.parse
render_call = _GRAMMAR.render_call
render_malformed_call = _GRAMMAR.render_malformed_call
render_thought = _GRAMMAR.render_thought
