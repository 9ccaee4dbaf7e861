"""How an episode went about its tools, read off the recorded messages: evidence, its use, repeats, empty code.

Evidence and its use are signs for people who look for patterns: a number that happens to be in a tool's reply and in
the answer counts as used. Which calls repeat one, and which only print, the misuse rules of scoring ask here too.
"""

import ast
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from turnwise.system.code_blocks import program
from turnwise.types import CallRecord, CallStatus, Message, Role, Trajectory

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_WORD = re.compile(r"[^\W\d_]{4,}")
_CODE_KEYS = ("code", "source", "script")
_LONGEST_CODE = 20_000
_SORTED = json.JSONEncoder(sort_keys=True, default=repr)
_SAYING = {"print", "str", "repr", "int", "float", "bool", "format", "list", "tuple", "dict", "set"}


@dataclass(frozen=True, slots=True)
class ToolBehaviour:
    """`ToolBehaviour(evidence=True, used=False, duplicate_calls=1, print_only=0)`."""

    evidence: bool
    """A call that worked said something."""
    used: bool
    """A number or word of such a reply, not in the question, stands in what the assistant wrote later."""
    duplicate_calls: int
    """Calls equal to an earlier one (`repeated`)."""
    print_only: int
    """Calls whose Python only says what is written in it (`is_print_only`)."""


def tool_behaviour(trajectory: Trajectory) -> ToolBehaviour:
    """Everything about a trajectory's calls at once."""
    in_prompt = _tokens(" ".join(message.text for message in trajectory.sample.prompt))
    from_tools: set[str] = set()
    evidence = used = False
    for turn in trajectory.turns:
        used = used or bool(from_tools & _tokens(turn.message.text))
        worked = {call.call.id for call in turn.calls if not call.status.failed}
        for reply in turn.replies:
            if reply.role is Role.TOOL and reply.tool_call_id in worked and _says_something(reply):
                evidence = True
                from_tools |= _tokens(reply.text) - in_prompt
    calls = trajectory.calls
    return ToolBehaviour(evidence, used, sum(repeated(calls)), sum(prints_only(call) for call in calls))


def repeated(calls: Iterable[CallRecord]) -> list[bool]:
    """Which of an episode's calls ask the same as one before: name and arguments, white space in code left aside.

    A call that could not be read may have meant anything, one that was refused was not made: neither counts.
    """
    keys: set[str] = set()
    flags = []
    for record in calls:
        key = _key(record)
        flags.append(key in keys)
        keys |= {key} if key is not None else set()
    return flags


def prints_only(record: CallRecord) -> bool:
    """Whether a call that worked ran code which only says what is written in it (`is_print_only`)."""
    return not record.status.failed and is_print_only(_code(record.call.arguments))


def is_print_only(code: object) -> bool:
    """Whether code only says what is written in it: it has no name but its own, computes nothing, and says something.

    A name it did not make itself (an image, a file, an earlier variable, a package's content) is something to look at,
    and arithmetic is what a tool is for. Definitions and imports alone may serve a later call.
    """
    if not isinstance(code, str) or len(code) > _LONGEST_CODE:
        return False
    try:
        tree = ast.parse(program(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # what is no program did nothing; its error tells
        return False
    nodes = list(ast.walk(tree))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    own = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    looks = any(node.id not in own | _SAYING for node in names if isinstance(node.ctx, ast.Load))
    says = any(isinstance(node, ast.Expr) for node in tree.body) or any(node.id == "print" for node in names)
    return says and not looks and not any(map(_computes, nodes))


def _computes(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):  # with a text it is another way to write that text
        return not any(_is_text(side) for side in (node.left, node.right))
    return isinstance(node, ast.AugAssign | ast.Compare)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _says_something(reply: Message) -> bool:
    return not isinstance(reply.content, str) or reply.content.strip() not in ("", "(no output)", "None", "null")


def _tokens(text: str) -> set[str]:
    words = set(_WORD.findall(text.lower())) if text.isascii() else {word.lower() for word in _WORD.findall(text)}
    words.update([number.replace(",", "") for number in _NUMBER.findall(text)])
    return words


def _key(record: CallRecord) -> str | None:
    """Equal for equal calls; None for one that cannot be compared."""
    call = record.call
    if call.problem is not None or record.status in (CallStatus.MALFORMED, CallStatus.REFUSED):
        return None
    arguments: dict[str, Any] = dict(call.arguments)
    for key in _CODE_KEYS:
        if isinstance(arguments.get(key), str):  # white space at line ends and empty lines make no other program
            arguments[key] = [line.rstrip() for line in program(arguments[key]).splitlines() if line.strip()]
    try:
        return f"{call.name} {_SORTED.encode(arguments)}"
    except RecursionError:  # a model can nest deeper than JSON is written
        return None


def _code(arguments: dict[str, Any]) -> str | None:
    return next((arguments[key] for key in _CODE_KEYS if isinstance(arguments.get(key), str)), None)
