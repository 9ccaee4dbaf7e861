"""The code format: Python between <code> tags, or else in fenced blocks, is a call of the `python` tool.

All blocks of a turn are one program. A turn with an <answer> is final: code beside it is not run.
"""

import json
import re

from turnwise.types import Message, Role, ToolCall

TOOL = "python"
_BLOCK = re.compile(r"<code>(.*?)(</code>|\Z)", re.DOTALL)
_FENCE = re.compile(r"^```(?:python|py)[ \t]*\n(.*?)(^```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_ANY_FENCE = re.compile(r"\A\s*```(?:python|py)?[ \t]*\n(.*?)\n?```\s*\Z", re.DOTALL)


def parse(text: str, *, turn: int, in_reasoning: bool) -> Message:
    """The assistant message in a completion's text. Code the model only thinks about is never run."""
    thoughts, said = _set_thoughts_apart(text, in_reasoning)
    pattern = _BLOCK if "<code>" in said else _FENCE
    blocks = list(pattern.finditer(said))
    calls: tuple[ToolCall, ...] = ()
    if blocks and "<answer>" not in said:
        calls = (_call(blocks, f"t{turn % 1000:03d}c0000"),)
    return Message(
        Role.ASSISTANT,
        text,
        calls,
        reasoning="\n".join(thoughts) if thoughts else None,
        answer=pattern.sub("", said).strip(),
    )


def render_call(call: ToolCall) -> str:
    """The text a model writes to make this call."""
    code = call.arguments.get("code", json.dumps(call.arguments))  # only code can be written; anything else is data
    return f"<code>\n{code}\n</code>"


def _call(blocks: list["re.Match[str]"], call_id: str) -> ToolCall:
    if not blocks[-1].group(2):
        return ToolCall(call_id, TOOL, {}, "the code has no end: close it with </code>, or ``` after a fence")
    programs = []
    for block in blocks:
        fenced = _ANY_FENCE.match(block.group(1))
        programs.append((fenced.group(1) if fenced else block.group(1)).strip("\n"))
    return ToolCall(call_id, TOOL, {"code": "\n".join(programs)})


def _set_thoughts_apart(text: str, in_reasoning: bool) -> tuple[list[str], str]:
    """(thoughts, everything else). A thought that is never closed goes on to the end."""
    thoughts, said, position = [], [], 0
    thinking = in_reasoning and not text.lstrip().startswith("<think>")
    while position < len(text):
        mark = "</think>" if thinking else "<think>"
        end = text.find(mark, position)
        piece = text[position : end if end >= 0 else None]
        if thinking:
            thoughts.append(piece.strip())
        elif "</think>" in piece:  # closed without being opened: all before was thought
            before, _, after = piece.rpartition("</think>")
            thoughts.append(before.strip())
            said.append(after)
        else:
            said.append(piece)
        if end < 0:
            break
        position, thinking = end + len(mark), not thinking
    return thoughts, "".join(said)
