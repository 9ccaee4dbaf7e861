"""The deepseek format: JSON between DeepSeek's own marks, in a code fence or not.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search
    ```json
    {"query": "tides"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Of DeepSeek V3 and R1; what V3.1 writes, search<｜tool▁sep｜>{"query": "tides"} between the same marks, is read too.
Newer ones: `deepseek_v4`.
"""

import json
import re
from collections.abc import Sequence

from turnwise.chat.calls.json_calls import JsonBefore, call_with
from turnwise.chat.calls.reasoning import ANSWER, CALL_ENDS, STOPS, THINK, UNTHINK, render_thought  # noqa: F401
from turnwise.chat.calls.scanning import FoundCall, Piece, Scanner, any_of, refuse_unless_read_back
from turnwise.types import JsonSchema, Message, ToolCall

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, SEPARATOR, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_MARKS = (SECTION, SECTION_END, OPEN, SEPARATOR, CLOSE)
_NAME = r"\s*([^\s<>｜]+)\s*"
_FENCED = re.compile(rf"\s*function{SEPARATOR}{_NAME}```(?:json)?")
_BARE = re.compile(rf"{_NAME}{SEPARATOR}")
_BODY = JsonBefore((*_MARKS, THINK, UNTHINK))
_FENCED_BODY = JsonBefore(("```", *_MARKS, THINK, UNTHINK))
_NEXT = re.compile(any_of((*_MARKS, THINK, UNTHINK)) + r"|\Z")
_CLOSES = re.compile(rf"\s*{CLOSE}")


def parse(text: str, *, turn: int, in_reasoning: bool, tools: Sequence[JsonSchema] = ()) -> Message:
    """The assistant message in a completion's text."""
    return _SCANNER.message(text, turn=turn, in_reasoning=in_reasoning)


def render_call(call: ToolCall) -> str:
    """The text a model writes to make this call, in a section of its own."""
    body = json.dumps(call.arguments, ensure_ascii=False)
    text = f"{SECTION}{OPEN}function{SEPARATOR}{call.name}\n```json\n{body}\n```{CLOSE}{SECTION_END}"
    return refuse_unless_read_back(text, call, parse(text, turn=0, in_reasoning=False).tool_calls, "deepseek")


def render_malformed_call(call: ToolCall) -> str:
    """The call with a brace too few."""
    return render_call(call).replace("}\n```" + CLOSE, "\n```" + CLOSE)


def _read(text: str, mark: re.Match[str], tools: Sequence[JsonSchema]) -> tuple[list[Piece], int]:
    if mark.group() != OPEN:  # the section's own marks say nothing; one that is never closed holds its calls still
        return [], mark.end()
    fenced = _FENCED.match(text, mark.end())
    named = fenced or _BARE.match(text, mark.end())
    if named is None:
        problem = f"after {OPEN} comes function{SEPARATOR}NAME and JSON in a code fence"
        return [FoundCall("", {}, problem)], _following(text, mark.end())
    body = (_FENCED_BODY if fenced else _BODY).read(text, named.end())
    end = _CLOSES.match(text, body.end) if body.mark == "```" else None
    if end is None and body.mark != CLOSE:
        return [FoundCall(named[1], {}, f"the call has no {CLOSE}")], _following(text, body.stop)
    if body.problem is not None or (fenced and end is None):
        problem = f"the arguments are not valid JSON: {body.problem or 'the code fence is not closed'}"
        return [FoundCall(named[1], {}, problem)], end.end() if end else body.end
    return [call_with(named[1], body.value)], end.end() if end else body.end


def _following(text: str, start: int) -> int:
    """Where the next mark begins in the text, or its end when there is none."""
    following = _NEXT.search(text, start)
    assert following is not None  # \Z matches at the latest
    return following.start()


_SCANNER = Scanner(any_of(_MARKS), _read)
