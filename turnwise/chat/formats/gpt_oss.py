"""The gpt_oss format (harmony): every message names its channel, and a call the tool that it is for.

    <|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "tides"}<|call|>
    <|channel|>analysis<|message|>a thought<|end|><|start|>assistant<|channel|>final<|message|>an answer<|return|>

Of gpt-oss. The prompt ends with <|start|>assistant, so a completion begins with a channel, or with to=. What the model
says in the analysis channel is thought; all else that is not a call is its answer.
"""

import json
import re
from collections.abc import Sequence

from turnwise.chat.calls.json_calls import JsonBefore, call_with
from turnwise.chat.calls.scanning import FoundCall, numbered, refuse_unless_read_back
from turnwise.types import JsonSchema, Message, Role, ToolCall

START, CHANNEL, MESSAGE = "<|start|>assistant", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
THINK, UNTHINK = f"{CHANNEL}analysis{MESSAGE}", END
ANSWER = f"{CHANNEL}final{MESSAGE}"
STOPS = (CALL, RETURN)
CALL_ENDS = (CALL,)
_HEADER = re.compile(
    r"(?:<\|start\|>assistant\s*)?(?:to=(?P<before>[^\s<]{1,128})\s*)?<\|channel\|>\s*(?P<channel>\w+)(?!\w)"
    r"(?:\s*to=(?P<after>[^\s<]+)(?![^\s<]))?[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
"""Every part can be read in one way only, so that a header that is none costs no more than its length."""
_MESSAGE_END = re.compile(r"<\|(?:end|return|call)\|>|(?=<\|(?:start|channel)\|>)|\Z")
_THOUGHT_END = re.compile(r"<\|(?:end|return)\|>|(?=<\|start\|>)|\Z")
"""A call that stands in a thought is none, so another channel does not end it."""
_MARKS = re.compile(r"<\|start\|>assistant|<\|(?:end|return|call)\|>")
_BODY = JsonBefore((CALL, END, RETURN, "<|start|>", CHANNEL))


def parse(text: str, *, turn: int, in_reasoning: bool, tools: Sequence[JsonSchema] = ()) -> Message:
    """The assistant message in a completion's text."""
    thoughts, answers, calls, position = list[str](), list[str](), list[FoundCall](), 0
    if in_reasoning and not text.lstrip().startswith(THINK):
        thought, position = _until(_THOUGHT_END, text, 0)
        thoughts.append(thought)
    while position < len(text):
        header = _HEADER.search(text, position)
        answers.append(_MARKS.sub("", text[position : header.start() if header else None]))
        if header is None:
            break
        recipient = header["before"] or header["after"]
        if recipient is not None:
            call, position = _call(recipient.removeprefix("functions."), text, header.end())
            calls.append(call)
        elif header["channel"] == "analysis":
            thought, position = _until(_THOUGHT_END, text, header.end())
            thoughts.append(thought)
        else:
            answer, position = _until(_MESSAGE_END, text, header.end())
            answers.append(answer)
    answer = "\n".join(words for part in answers if (words := part.strip()))
    reasoning = "\n".join(thoughts) if thoughts else None
    return Message(Role.ASSISTANT, text, tuple(numbered(calls, turn)), reasoning=reasoning, answer=answer)


def render_call(call: ToolCall) -> str:
    """The text a model writes to make this call."""
    body = json.dumps(call.arguments, ensure_ascii=False)
    text = f"{CHANNEL}commentary to=functions.{call.name} <|constrain|>json{MESSAGE}{body}{CALL}"
    return refuse_unless_read_back(text, call, parse(text, turn=0, in_reasoning=False).tool_calls, "gpt_oss")


def render_malformed_call(call: ToolCall) -> str:
    """The call with a brace too few."""
    return render_call(call).removesuffix("}" + CALL) + CALL


def render_thought(thought: str, *, is_open: bool) -> str:
    """The text of a thought, and the beginning of what follows it; `is_open` when the prompt opened it."""
    return f"{'' if is_open else THINK}{thought}{END}{START}"


def _call(name: str, text: str, start: int) -> tuple[FoundCall, int]:
    body = _BODY.read(text, start)
    end = body.end if body.mark in (CALL, END, RETURN) else body.stop
    if body.mark != CALL:
        return FoundCall(name, {}, f"the call has no {CALL}"), end
    if body.problem is not None:
        return FoundCall(name, {}, f"the arguments are not valid JSON: {body.problem}"), end
    return call_with(name, body.value), end


def _until(ending: re.Pattern[str], text: str, start: int) -> tuple[str, int]:
    """(the words up to an end, where they end)."""
    match = ending.search(text, start)
    assert match is not None  # \Z matches at the latest
    return text[start : match.start()].strip(), match.end()
