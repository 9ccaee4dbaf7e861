"""The glm format: the tool's name, then keys and values between tags.

    <tool_call>search
    <arg_key>query</arg_key>
    <arg_value>tides</arg_value>
    </tool_call>

Of GLM-4.5 and later; the token that opens the tool's reply ends the turn.
"""

from turnwise.chat.calls.reasoning import ANSWER, CALL_ENDS, THINK, UNTHINK  # noqa: F401
from turnwise.chat.calls.tagged_calls import TagGrammar

STOPS = ("<|observation|>",)
_GRAMMAR = TagGrammar(
    "glm",
    block=[("<tool_call>", "</tool_call>")],
    call=("{}", ""),
    parameter=("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>"),
)
parse = _GRAMMAR.parse
render_call = _GRAMMAR.render_call
render_malformed_call = _GRAMMAR.render_malformed_call


def render_thought(thought: str, *, is_open: bool) -> str:
    """The text of a thought; `is_open` when the prompt opened it."""
    return f"{'' if is_open else THINK}{thought}{UNTHINK}\n"
