"""A Trajectory as a row of a trajectory file and back."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from turnwise.errors import StorageError
from turnwise.storage.json_values import from_json, to_json
from turnwise.storage.trajectories.ledger_columns import (
    check_training,
    ledger_of,
    ledger_row,
    media_rows,
    place_in,
)
from turnwise.storage.trajectories.older_formats import Row, current
from turnwise.types import (
    Branch,
    CallRecord,
    CallStatus,
    EnvironmentRecord,
    EpisodeFacts,
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

Made = dict[int, Row]
"""Rows by the identity of their message or call: turns hold the same objects as the conversation."""


LATER = ("failure", "reward", "parts", "advantage", "first_right", "remarks", "reused_from")
"""What scoring, an evaluation or a training writes on a trajectory that was played."""


def to_row(trajectory: Trajectory) -> Row:
    """A trajectory as plain JSON values: a row of SCHEMA."""
    return words_row(trajectory) | {"segments": [ledger_row(ledger) for ledger in trajectory.segments]}


def words_row(trajectory: Trajectory) -> Row:
    """All but the tokens of a trajectory as a row of SCHEMA."""
    sample, check, cache = trajectory.sample, trajectory.render_check, Made()
    spec = sample.interaction
    try:
        for ledger in trajectory.segments:
            check_training(ledger)
        return {
            "sample_id": sample.id,
            "data_source": sample.data_source,
            "step": trajectory.step,
            "sibling": trajectory.sibling,
            "stop_reason": trajectory.stop_reason.value,
            "seconds": trajectory.seconds,
            "prompt": _message_rows(sample.prompt, cache),
            "ground_truth": to_json(sample.ground_truth, "ground_truth"),
            "agent": sample.agent,
            "tools": sample.tools,
            "tools_kwargs": to_json(sample.tools_kwargs, "tools_kwargs"),
            "interaction": spec and {"name": spec.name, "kwargs": to_json(spec.kwargs, "interaction kwargs")},
            "images": [image.source for image in sample.images],
            "info": to_json(sample.info, "info"),
            "messages": _message_rows(trajectory.messages, cache),
            "turns": [_turn_row(turn, cache) for turn in trajectory.turns],
            "artifacts": to_json(trajectory.artifacts, "artifacts"),
            "render_check": check and asdict(check),
            "facts": _facts_row(trajectory.facts),
            "branches": [_branch_row(branch, cache) for branch in trajectory.branches],
            "media": media_rows(trajectory.segments),
            **later_row(trajectory),
        }
    except StorageError as error:
        raise StorageError(f"sample {sample.id!r}, sibling {trajectory.sibling}: {error}") from error


def later_row(trajectory: Trajectory) -> Row:
    """The columns of LATER."""
    return {
        "failure": trajectory.failure,
        "reward": trajectory.reward,
        "parts": list(trajectory.parts.items()),
        "advantage": trajectory.advantage,
        "first_right": trajectory.first_right,
        "remarks": [asdict(remark) for remark in trajectory.remarks],
        "reused_from": trajectory.reused_from,
    }


def from_row(row: Row) -> Trajectory:
    """The trajectory of a row of plain JSON values; ValueError for a row this code did not write."""
    row = current(row)
    trajectory = from_words_row(row)
    trajectory.segments = [ledger_of(ledger) for ledger in row["segments"]]
    place_in(trajectory.segments, row["media"])
    check_read(trajectory)
    return trajectory


def from_words_row(row: Row) -> Trajectory:
    """The trajectory of a row of SCHEMA, its tokens left out; ValueError for a row this code did not write."""
    interaction, check, artifacts = row["interaction"], row["render_check"], from_json(row["artifacts"])
    reused_from = row["reused_from"]
    if type(reused_from) not in (int, type(None)):
        raise ValueError("a reused_from that is not a step number")
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
        render_check=check and RenderCheck(**check),
        reward=row["reward"],
        parts=dict(row["parts"]),
        advantage=row["advantage"],
        first_right=row["first_right"],
        remarks=[_remark(entry) for entry in row["remarks"]],
        branches=[_branch(entry) for entry in row["branches"]],
        reused_from=reused_from,
        facts=_facts(row["facts"]),
    )


def check_read(trajectory: Trajectory) -> None:
    """ValueError for what a file can hold and no trajectory is: nulls, numbers that lead nowhere, other lengths."""
    sample = trajectory.sample
    if None in (sample.id, sample.data_source, trajectory.step, trajectory.sibling, trajectory.seconds):
        raise ValueError("a trajectory without an id, a data source, a step, a sibling or a time")
    if not all(isinstance(value, dict) for value in (sample.info, sample.tools_kwargs, trajectory.artifacts)):
        raise ValueError("a sample whose info, tools_kwargs or artifacts are not a JSON object")
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


def _facts_row(facts: EpisodeFacts) -> Row:
    environment = facts.environment
    return {
        "environment": environment and asdict(environment) | {"metrics": list(environment.metrics.items())},
        "user_score": facts.user_score,
        "user_notes": to_json(facts.user_notes, "user notes"),
        "tool_rewards": list(facts.tool_rewards.items()),
        "agent_error": facts.agent_error,
        "ignored_requests": facts.ignored_requests,
        "engine_lost": facts.engine_lost,
    }


def _facts(row: Row) -> EpisodeFacts:
    environment, notes = row["environment"], from_json(row["user_notes"])
    if not isinstance(notes, list):
        raise ValueError("user_notes that are not a list")
    columns = {
        "environment": environment and EnvironmentRecord(**environment | {"metrics": dict(environment["metrics"])}),
        "user_notes": notes,
        "tool_rewards": dict(row["tool_rewards"]),
        "ignored_requests": list(row["ignored_requests"]),
        "engine_lost": list(row["engine_lost"]),
    }
    return EpisodeFacts(**row | columns)


def _remark(row: Any) -> Remark:
    match row:
        case {"by": str(), "text": str(), "value": int() | float() | None, "turn": int() | None}:
            return Remark(**row)
    raise ValueError("a remark whose columns have other types")


def _branch_row(branch: Branch, cache: Made) -> Row:
    return {
        "name": branch.name,
        "trained": branch.trained,
        "messages": _message_rows(branch.messages, cache),
        "turns": [_turn_row(turn, cache) for turn in branch.turns],
    }


def _branch(row: Any) -> Branch:
    match row:
        case {"name": str(name), "trained": bool(trained), "messages": list(messages), "turns": list(turns)}:
            return Branch(name, list(_messages(messages)), [_turn(turn) for turn in turns], trained)
    raise ValueError("a branch whose columns have other types")


def _message_rows(messages: Sequence[Message], cache: Made) -> list[Row]:
    return [cache.get(id(message)) or _message_row(message, cache) for message in messages]


def _message_row(message: Message, cache: Made) -> Row:
    whole = isinstance(message.content, str)
    row = cache[id(message)] = {
        "role": message.role.value,
        "text": message.content if whole else None,
        "parts": None if whole else [_part_row(part) for part in message.content],  # type: ignore[arg-type]
        "tool_calls": [_call_row(call, cache) for call in message.tool_calls],
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


def _call_row(call: ToolCall, cache: Made) -> Row:
    if (row := cache.get(id(call))) is None:
        arguments = to_json(call.arguments, f"arguments of {call.name}")
        row = cache[id(call)] = {"id": call.id, "name": call.name, "arguments": arguments, "problem": call.problem}
    return row


def _turn_row(turn: Turn, cache: Made) -> Row:
    calls = [
        {
            "call": _call_row(record.call, cache),
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
        "message": _message_rows([turn.message], cache)[0],
        "finish_reason": turn.finish_reason.value,
        "policy_version": turn.policy_version,
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "segment": turn.segment,
        "start": turn.start,
        "calls": calls,
        "replies": _message_rows(turn.replies, cache),
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
    converted = ("message", "finish_reason", "calls", "replies", "scores")
    plain = {name: value for name, value in row.items() if name not in converted}
    return Turn(
        message=_message(row["message"]),
        finish_reason=FinishReason(row["finish_reason"]),
        calls=calls,
        replies=list(_messages(row["replies"])),
        scores=dict(row["scores"]),
        **plain,
    )
