"""The Arrow schema of a trajectory file, and a Trajectory as one of its rows and back."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from turnwise.errors import StorageError
from turnwise.storage.json_values import from_json, to_json
from turnwise.storage.ledger_columns import (
    LEDGER,
    LEDGERS,
    check_training,
    ledger_of,
    ledger_row,
    media_rows,
    place_in,
)
from turnwise.types import (
    Branch,
    CallRecord,
    CallStatus,
    FinishReason,
    Image,
    InteractionSpec,
    Message,
    Part,
    Remark,
    RenderCheck,
    Role,
    Sample,
    StopReason,
    Text,
    ToolCall,
    Trajectory,
    Turn,
)

VERSION = "6"
VERSION_KEY = b"turnwise.trajectories"

Row = dict[str, Any]
Made = dict[int, Row]
"""Rows by the identity of their message or call: turns hold the same objects as the conversation."""

_JSON = pa.string()  # a JSON text: values whose shape only their writer knows
_REMARKS_KEY = "turnwise:remarks"  # beside the artifacts: a column of its own would be a new format
_BRANCHES_KEY = "turnwise:branches"
_REUSED_KEY = "turnwise:reused_from"
_MEDIA_KEY = "turnwise:media"

_CALL = pa.struct([("id", pa.string()), ("name", pa.string()), ("arguments", _JSON), ("problem", pa.string())])
_PART = pa.struct([("kind", pa.string()), ("value", pa.string())])
_MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("text", pa.string()),  # null when the content comes in parts
        ("parts", pa.list_(_PART)),
        ("tool_calls", pa.list_(_CALL)),
        ("tool_call_id", pa.string()),
        ("name", pa.string()),
        ("reasoning", pa.string()),
        ("answer", pa.string()),
    ]
)
_RECORD = pa.struct(
    [
        ("call", _CALL),
        ("status", pa.string()),
        ("seconds", pa.float64()),
        ("truncated", pa.bool_()),
        ("score", pa.float64()),
        ("info", _JSON),
    ]
)
_TURN = pa.struct(
    [
        ("index", pa.int32()),
        ("message", _MESSAGE),
        ("finish_reason", pa.string()),
        ("policy_version", pa.int64()),
        ("prompt_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("segment", pa.int32()),
        ("start", pa.int32()),
        ("calls", pa.list_(_RECORD)),
        ("replies", pa.list_(_MESSAGE)),
        ("user_score", pa.float64()),
        ("scores", pa.map_(pa.string(), pa.float64())),
        ("generate_seconds", pa.float64()),
        ("reply_seconds", pa.float64()),
    ]
)
SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("data_source", pa.string()),
        ("step", pa.int64()),
        ("sibling", pa.int32()),
        ("stop_reason", pa.string()),
        ("failure", pa.string()),
        ("reward", pa.float64()),
        ("parts", pa.map_(pa.string(), pa.float64())),
        ("advantage", pa.float64()),
        ("first_right", pa.bool_()),
        ("seconds", pa.float64()),
        ("prompt", pa.list_(_MESSAGE)),
        ("ground_truth", _JSON),
        ("agent", pa.string()),
        ("tools", pa.list_(pa.string())),
        ("tools_kwargs", _JSON),
        ("interaction", pa.struct([("name", pa.string()), ("kwargs", _JSON)])),
        ("images", pa.list_(pa.string())),
        ("info", _JSON),
        ("messages", pa.list_(_MESSAGE)),
        ("turns", pa.list_(_TURN)),
        ("segments", pa.list_(LEDGER)),
        ("artifacts", _JSON),
        (
            "render_check",
            pa.struct([("exact", pa.bool_()), ("same_text", pa.bool_()), ("position", pa.int64())]),
        ),
    ],
    metadata={VERSION_KEY: VERSION},
)
SEGMENTS = SCHEMA.get_field_index("segments")
SCHEMAS = {
    version: SCHEMA.set(SEGMENTS, pa.field("segments", pa.list_(ledger))).with_metadata({VERSION_KEY: version})
    for version, ledger in LEDGERS.items()
}
"""Every format that is read."""


def to_row(trajectory: Trajectory) -> Row:
    """A trajectory as plain JSON values: a row of SCHEMA."""
    return words_row(trajectory) | {"segments": [ledger_row(ledger) for ledger in trajectory.segments]}


def words_row(trajectory: Trajectory) -> Row:
    """All but the tokens of a trajectory as a row of SCHEMA."""
    sample, check, made = trajectory.sample, trajectory.render_check, Made()
    spec = sample.interaction
    beside: Row = {}
    if trajectory.remarks:
        beside[_REMARKS_KEY] = [asdict(remark) for remark in trajectory.remarks]
    if trajectory.reused_from is not None:
        beside[_REUSED_KEY] = trajectory.reused_from
    if any(ledger.media for ledger in trajectory.segments):
        beside[_MEDIA_KEY] = media_rows(trajectory.segments)
    try:
        for ledger in trajectory.segments:
            check_training(ledger)
        if trajectory.branches:
            beside[_BRANCHES_KEY] = [_branch_row(branch, made) for branch in trajectory.branches]
        return {
            "sample_id": sample.id,
            "data_source": sample.data_source,
            "step": trajectory.step,
            "sibling": trajectory.sibling,
            "stop_reason": trajectory.stop_reason.value,
            "failure": trajectory.failure,
            "reward": trajectory.reward,
            "parts": list(trajectory.parts.items()),
            "advantage": trajectory.advantage,
            "first_right": trajectory.first_right,
            "seconds": trajectory.seconds,
            "prompt": _message_rows(sample.prompt, made),
            "ground_truth": to_json(sample.ground_truth, "ground_truth"),
            "agent": sample.agent,
            "tools": sample.tools,
            "tools_kwargs": to_json(sample.tools_kwargs, "tools_kwargs"),
            "interaction": spec and {"name": spec.name, "kwargs": to_json(spec.kwargs, "interaction kwargs")},
            "images": [image.source for image in sample.images],
            "info": to_json(sample.info, "info"),
            "messages": _message_rows(trajectory.messages, made),
            "turns": [_turn_row(turn, made) for turn in trajectory.turns],
            "artifacts": to_json(trajectory.artifacts | beside, "artifacts"),
            "render_check": check and {"exact": check.exact, "same_text": check.same_text, "position": check.position},
        }
    except StorageError as error:
        raise StorageError(f"sample {sample.id!r}, sibling {trajectory.sibling}: {error}") from error


def from_row(row: Row) -> Trajectory:
    """The trajectory of a row of plain JSON values; ValueError for a row this code did not write."""
    trajectory = from_words_row(row)
    trajectory.segments = [ledger_of(ledger) for ledger in row["segments"]]
    place_media(trajectory)
    check_read(trajectory)
    return trajectory


def from_words_row(row: Row) -> Trajectory:
    """The trajectory of a row, its tokens left out; ValueError for a row this code did not write."""
    interaction, check, artifacts = row["interaction"], row["render_check"], from_json(row["artifacts"])
    remarks = [_remark(entry) for entry in artifacts.pop(_REMARKS_KEY, ())]
    branches = [_branch(entry) for entry in artifacts.pop(_BRANCHES_KEY, ())]
    reused_from = artifacts.pop(_REUSED_KEY, None)
    if type(reused_from) not in (int, type(None)):
        raise ValueError("a step that trained first and is none")
    sample = Sample(
        id=row["sample_id"],
        prompt=_messages(row["prompt"]),
        data_source=row["data_source"],
        ground_truth=from_json(row["ground_truth"]),
        agent=row["agent"],
        tools=None if row["tools"] is None else tuple(row["tools"]),
        tools_kwargs=from_json(row["tools_kwargs"]),
        interaction=interaction and InteractionSpec(interaction["name"], from_json(interaction["kwargs"])),
        images=tuple(Image(source) for source in row["images"]),
        info=from_json(row["info"]),
    )
    return Trajectory(
        sample=sample,
        sibling=row["sibling"],
        step=row["step"],
        messages=list(_messages(row["messages"])),
        turns=[_turn(turn) for turn in row["turns"]],
        segments=[],
        stop_reason=StopReason(row["stop_reason"]),
        seconds=row["seconds"],
        failure=row["failure"],
        artifacts=artifacts,
        render_check=check and RenderCheck(check["exact"], check["same_text"], check["position"]),
        reward=row["reward"],
        parts=dict(row["parts"]),
        advantage=row["advantage"],
        first_right=row["first_right"],
        remarks=remarks,
        branches=branches,
        reused_from=reused_from,
    )


def place_media(trajectory: Trajectory) -> None:
    """Put the images of a row at their places in its ledgers; ValueError for places that no ledger has."""
    place_in(trajectory.segments, trajectory.artifacts.pop(_MEDIA_KEY, ()))


def check_read(trajectory: Trajectory) -> None:
    """ValueError for what a file can hold and no trajectory is: nulls, numbers that lead nowhere, other lengths."""
    sample = trajectory.sample
    if None in (sample.id, sample.data_source, trajectory.step, trajectory.sibling, trajectory.seconds):
        raise ValueError("a trajectory without an id, a data source, a step, a sibling or a time")
    if not all(isinstance(one, dict) for one in (sample.info, sample.tools_kwargs, trajectory.artifacts)):
        raise ValueError("a sample whose info, tools_kwargs or artifacts are no JSON object")
    try:
        for ledger in trajectory.segments:
            check_training(ledger)
    except StorageError as error:  # whoever reads a file names it
        raise ValueError(str(error)) from error
    for turn in trajectory.every_turn:
        numbers = (turn.index, turn.segment, turn.start, turn.prompt_tokens, turn.completion_tokens)
        version = turn.policy_version
        if version is None or version >= 1 << 31 or any(number is None or number < 0 for number in numbers):
            raise ValueError("a turn without a place, a version or a count of tokens")


def _remark(row: Any) -> Remark:
    match row:
        case {"by": str(), "text": str(), "value": int() | float() | None, "turn": int() | None}:
            return Remark(**row)
    raise ValueError("a remark that is none")


def _branch_row(branch: Branch, made: Made) -> Row:
    return {
        "name": branch.name,
        "trained": branch.trained,
        "messages": _message_rows(branch.messages, made),
        "turns": [_turn_row(turn, made) for turn in branch.turns],
    }


def branch_messages(artifacts: str) -> list[Row]:
    """The messages of the branches in a row's artifacts."""
    found = from_json(artifacts).get(_BRANCHES_KEY, ()) if _BRANCHES_KEY in artifacts else ()
    return [message for branch in found for message in branch["messages"]]


def _branch(row: Any) -> Branch:
    match row:
        case {"name": str(name), "trained": bool(trained), "messages": list(messages), "turns": list(turns)}:
            return Branch(name, list(_messages(messages)), [_turn(turn) for turn in turns], trained)
    raise ValueError("a branch that is none")


def _message_rows(messages: Sequence[Message], made: Made) -> list[Row]:
    return [made.get(id(message)) or _message_row(message, made) for message in messages]


def _message_row(message: Message, made: Made) -> Row:
    whole = isinstance(message.content, str)
    row = made[id(message)] = {
        "role": message.role.value,
        "text": message.content if whole else None,
        "parts": None if whole else [_part_row(part) for part in message.content],  # type: ignore[arg-type]
        "tool_calls": [_call_row(call, made) for call in message.tool_calls],
        "tool_call_id": message.tool_call_id,
        "name": message.name,
        "reasoning": message.reasoning,
        "answer": message.answer,
    }
    return row


def _part_row(part: Part) -> Row:
    if isinstance(part, Text):
        return {"kind": "text", "value": part.text}
    return {"kind": "image", "value": part.source}


def _call_row(call: ToolCall, made: Made) -> Row:
    if (row := made.get(id(call))) is None:
        arguments = to_json(call.arguments, f"arguments of {call.name}")
        row = made[id(call)] = {"id": call.id, "name": call.name, "arguments": arguments, "problem": call.problem}
    return row


def _turn_row(turn: Turn, made: Made) -> Row:
    calls = [
        {
            "call": _call_row(record.call, made),
            "status": record.status.value,
            "seconds": record.seconds,
            "truncated": record.truncated,
            "score": record.score,
            "info": to_json(record.info, f"info of a call of {record.call.name}"),
        }
        for record in turn.calls
    ]
    return {
        "index": turn.index,
        "message": _message_rows([turn.message], made)[0],
        "finish_reason": turn.finish_reason.value,
        "policy_version": turn.policy_version,
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "segment": turn.segment,
        "start": turn.start,
        "calls": calls,
        "replies": _message_rows(turn.replies, made),
        "user_score": turn.user_score,
        "scores": list(turn.scores.items()),
        "generate_seconds": turn.generate_seconds,
        "reply_seconds": turn.reply_seconds,
    }


def _messages(rows: list[Row]) -> tuple[Message, ...]:
    return tuple(_message(row) for row in rows)


def _message(row: Row) -> Message:
    content = row["text"] if row["parts"] is None else tuple(_part(part) for part in row["parts"])
    if content is None:
        raise ValueError("a message without content")
    return Message(
        role=Role(row["role"]),
        content=content,
        tool_calls=tuple(_call(call) for call in row["tool_calls"]),
        tool_call_id=row["tool_call_id"],
        name=row["name"],
        reasoning=row["reasoning"],
        answer=row["answer"],
    )


def _part(row: Row) -> Part:
    kinds: dict[str, type[Text] | type[Image]] = {"text": Text, "image": Image}
    return kinds[row["kind"]](row["value"])


def _call(row: Row) -> ToolCall:
    return ToolCall(row["id"], row["name"], from_json(row["arguments"]), row["problem"])


def _turn(row: Row) -> Turn:
    calls = [
        CallRecord(
            _call(record["call"]),
            CallStatus(record["status"]),
            record["seconds"],
            record["truncated"],
            record["score"],
            from_json(record["info"]),
        )
        for record in row["calls"]
    ]
    made = ("message", "finish_reason", "calls", "replies", "scores")
    plain = {name: value for name, value in row.items() if name not in made}
    return Turn(
        message=_message(row["message"]),
        finish_reason=FinishReason(row["finish_reason"]),
        calls=calls,
        replies=list(_messages(row["replies"])),
        scores=dict(row["scores"]),
        **plain,
    )
