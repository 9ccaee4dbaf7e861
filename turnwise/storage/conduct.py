"""How an episode went about its tools, read off the recorded messages: evidence, its use, repeats, empty code.

These are signs for people who look for patterns, not rewards: a number that happens to be in a tool's reply and in the
answer counts as used.
"""

import ast
import json
import re
from dataclasses import dataclass
from typing import Any

from turnwise.types import CallStatus, Message, Role, Trajectory

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_WORD = re.compile(r"[^\W\d_]{4,}")
_CODE_KEYS = ("code", "source", "script")
_LONGEST_CODE = 20_000


@dataclass(frozen=True, slots=True)
class Conduct:
    """`Conduct(evidence=True, used=False, duplicate_calls=1, print_only=0)`."""

    evidence: bool
    """A call that worked said something."""
    used: bool
    """A number or word of such a reply, not in the question, stands in what the assistant wrote later."""
    duplicate_calls: int
    """Calls equal to an earlier one, name and arguments."""
    print_only: int
    """Calls whose Python does nothing but print constants."""


def conduct_of(trajectory: Trajectory) -> Conduct:
    """Everything about a trajectory's calls at once."""
    asked = _tokens(" ".join(message.text for message in trajectory.sample.prompt))
    said: set[str] = set()
    evidence = used = False
    for turn in trajectory.turns:
        used = used or bool(said & _tokens(turn.message.text))
        worked = {call.call.id for call in turn.calls if not call.status.failed}
        for reply in turn.replies:
            if reply.role is Role.TOOL and reply.tool_call_id in worked and _says_something(reply):
                evidence = True
                said |= _tokens(reply.text) - asked
    seen: set[str] = set()
    duplicates = empty = 0
    for call in trajectory.calls:
        if call.status is CallStatus.MALFORMED:
            continue
        key = _key(call.call.name, call.call.arguments)
        duplicates += key in seen
        seen.add(key)
        empty += _prints_only(call.call.arguments)
    return Conduct(evidence, used, duplicates, empty)


def _says_something(reply: Message) -> bool:
    return not isinstance(reply.content, str) or reply.content.strip() not in ("", "(no output)", "None", "null")


def _tokens(text: str) -> set[str]:
    return {number.replace(",", "") for number in _NUMBER.findall(text)} | {w.lower() for w in _WORD.findall(text)}


def _key(name: str, arguments: dict[str, Any]) -> str:
    try:
        return f"{name} {json.dumps(arguments, sort_keys=True, default=repr)}"
    except RecursionError:  # a model can nest deeper than JSON is written; such calls equal each other by name only
        return name


def _prints_only(arguments: dict[str, Any]) -> bool:
    code = next((arguments[key] for key in _CODE_KEYS if isinstance(arguments.get(key), str)), None)
    if code is None or len(code) > _LONGEST_CODE:
        return False
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # what a model wrote need not be Python
        return False
    return bool(body) and all(_is_constant_print(statement) for statement in body)


def _is_constant_print(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr):
        return False
    value = statement.value
    if isinstance(value, ast.Constant):
        return True
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id == "print"
        and all(isinstance(argument, ast.Constant) for argument in value.args)
    )
