"""The three actions on a repository: what the policy is told of them, and what arguments they take."""

from typing import Any

import jsonschema

BASH = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "what bash runs, in the root of the repository"}},
    "required": ["command"],
    "additionalProperties": False,
}
EDIT = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
        "path": {"type": "string", "description": "relative to the root of the repository"},
        "file_text": {"type": "string", "description": "create: the content of the new file"},
        "old_str": {"type": "string", "description": "str_replace: what occurs exactly once"},
        "new_str": {"type": "string", "description": "str_replace, insert: the new text"},
        "insert_line": {"type": "integer", "description": "insert: after which line, 0 for the beginning"},
        "view_range": {"type": "array", "items": {"type": "integer"}, "description": "view: first and last line"},
    },
    "required": ["command", "path"],
    "additionalProperties": False,
}
FINISH = {"type": "object", "properties": {}, "additionalProperties": False}
ACTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "bash": ("Run a command in a new shell in the root of the repository; its processes end with it.", BASH),
    "edit": ("View, create or change a text file of the repository.", EDIT),
    "finish": ("Say that the work is done. The repository is then judged as it is.", FINISH),
}
"""By name: the description, and the schema of the arguments."""
_NEEDED = {"create": ("file_text",), "str_replace": ("old_str", "new_str"), "insert": ("insert_line", "new_str")}
_VALIDATORS = {name: jsonschema.Draft202012Validator(schema) for name, (_, schema) in ACTIONS.items()}


class BadAction(Exception):
    """Arguments that no action takes; the policy reads why."""


def check_action(name: str, arguments: dict[str, Any]) -> None:
    """BadAction for what cannot be done as it is asked."""
    if name not in ACTIONS:
        raise BadAction(f"there is no action {name[:80]!r}; there are {', '.join(ACTIONS)}")
    fault = next(_VALIDATORS[name].iter_errors(arguments), None)
    if fault is not None:
        raise BadAction(f"bad arguments for {name}: {fault.message[:200]}")
    missing = [key for key in _NEEDED.get(arguments.get("command", ""), ()) if key not in arguments]
    if name == "edit" and missing:
        raise BadAction(f"edit: {arguments['command']} needs {' and '.join(missing)}")
