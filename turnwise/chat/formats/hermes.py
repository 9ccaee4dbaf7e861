"""The hermes tool-call format: JSON inside <tool_call> tags, reasoning inside <think> tags."""

import json
import re

from turnwise.types import Message, Role, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


def parse(text: str, *, turn: int, in_reasoning: bool) -> Message:
    """The assistant message in a completion's text.

    Reasoning is set apart before calls are looked for, so a call the model only considers is never run.
    `in_reasoning` says that the prompt already opened the <think> block.
    """
    reasoning, rest = _split_reasoning(text, in_reasoning)
    calls: list[ToolCall] = []
    for number, block in enumerate(_BLOCK.finditer(rest)):
        # Nine letters and digits: some templates accept no other form of id.
        calls.append(_read_call(block.group(1), bool(block.group(2)), f"t{turn % 1000:03d}c{number % 10000:04d}"))
    answer = _BLOCK.sub("", rest).strip()
    return Message(Role.ASSISTANT, text, tuple(calls), reasoning=reasoning, answer=answer)


def render_call(call: ToolCall) -> str:
    """The text a model writes to make this call."""
    body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"{OPEN}\n{body}\n{CLOSE}"


def _split_reasoning(text: str, in_reasoning: bool) -> tuple[str | None, str]:
    """(reasoning, the rest). An unclosed block is all reasoning; several blocks are joined."""
    if in_reasoning:
        text = "<think>" + text
    elif "</think>" in text and text.find("</think>") < (text.find("<think>") % (len(text) + 1)):
        text = "<think>" + text  # closed without being opened: the prompt must have opened it
    thoughts: list[str] = []
    rest: list[str] = []
    for piece in re.split(r"(<think>.*?(?:</think>|\Z))", text, flags=re.DOTALL):
        if piece.startswith("<think>"):
            thoughts.append(piece.removeprefix("<think>").removesuffix("</think>").strip())
        else:
            rest.append(piece)
    return ("\n".join(thoughts) if thoughts else None), "".join(rest)


def _read_call(body: str, closed: bool, call_id: str) -> ToolCall:
    if not closed:
        return ToolCall(call_id, "", {}, f"the call has no {CLOSE}")
    try:
        value = json.loads(body)
    except (json.JSONDecodeError, RecursionError) as error:
        return ToolCall(call_id, "", {}, f"the call is not valid JSON: {error}")
    if not isinstance(value, dict):
        return ToolCall(call_id, "", {}, 'the call must be an object like {"name": ..., "arguments": {...}}')
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        return ToolCall(call_id, "", {}, 'the call has no "name"')
    if isinstance(arguments, str):  # some models write the arguments as JSON in a string
        try:
            arguments = json.loads(arguments)
        except (json.JSONDecodeError, RecursionError) as error:
            return ToolCall(call_id, name, {}, f'"arguments" is not valid JSON: {error}')
    if not isinstance(arguments, dict):
        return ToolCall(call_id, name, {}, '"arguments" must be an object')
    return ToolCall(call_id, name, arguments)
