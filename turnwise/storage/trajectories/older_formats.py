"""Rows of trajectory formats 3 to 6 as format 7 has them: typed data lay among the artifacts, under keys of its own."""

from typing import Any

from turnwise.storage.json_values import from_json, to_json

Row = dict[str, Any]

_REMARKS, _BRANCHES, _REUSED, _MEDIA = (f"turnwise:{name}" for name in ("remarks", "branches", "reused_from", "media"))


def current(row: Row) -> Row:
    """The row with the columns of the present format; one that has them is given back as it is."""
    if "facts" in row:
        return row
    artifacts = from_json(row["artifacts"])
    if not isinstance(artifacts, dict):
        raise ValueError("artifacts that are not a JSON object")
    columns = {
        "remarks": artifacts.pop(_REMARKS, []),
        "branches": artifacts.pop(_BRANCHES, []),
        "reused_from": artifacts.pop(_REUSED, None),
        "media": _media(artifacts.pop(_MEDIA, [])),
        "facts": _facts(artifacts),
    }
    check, problem = row["render_check"], _take(artifacts, "render_problem", str)
    if check is not None:
        check = check | {"problem": problem}
    return row | columns | {"render_check": check, "artifacts": to_json(artifacts, "artifacts")}


def branch_messages(row: Row) -> list[Row]:
    """The messages of the branches, of a row of any format that has at least them or the artifacts."""
    branches = row.get("branches")
    if branches is None:
        text = row["artifacts"]
        branches = from_json(text).get(_BRANCHES, ()) if _BRANCHES in text else ()
    return [message for branch in branches for message in branch["messages"]]


def _media(entries: Any) -> Any:
    """[digest, first token, how many] as the columns have it; what is no such list is left for the reader to refuse."""
    if not isinstance(entries, list):
        return entries
    names = ("digest", "start", "tokens")
    return [
        [dict(zip(names, entry, strict=False)) if isinstance(entry, list) else entry for entry in ledger]
        if isinstance(ledger, list)
        else ledger
        for ledger in entries
    ]


def _facts(artifacts: dict[str, Any]) -> Row:
    """What the episode's own code had left there; a value of another kind is a user's, and stays."""
    environment: Row | None = None
    match artifacts.get("environment"):
        case {"reward": int() | float() | None as reward, "finished": bool() as finished, "metrics": dict() as metrics}:
            left_open, totals = artifacts.pop("environment").get("left_open"), list(metrics.items())
            environment = {"reward": reward, "finished": finished, "metrics": totals, "left_open": left_open}
    notes = _take(artifacts, "interaction_notes", list) or []
    return {
        "environment": environment,
        "user_score": _take(artifacts, "interaction_score", float, int),
        "user_notes": to_json(notes, "user notes"),
        "tool_rewards": list((_take(artifacts, "tool_rewards", dict) or {}).items()),
        "agent_error": _take(artifacts, "agent_error", str),
        "ignored_requests": _take(artifacts, "client_ignored", list) or [],
        "engine_lost": _take(artifacts, "engine_lost", list) or [],
    }


def _take(artifacts: dict[str, Any], name: str, *kinds: type) -> Any:
    return artifacts.pop(name) if type(artifacts.get(name)) in kinds else None
