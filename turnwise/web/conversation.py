"""One trajectory as a page shows it: turns with calls and replies, images with crops, the reward step by step."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from turnwise.errors import StorageError
from turnwise.ledger import origin_counts
from turnwise.storage.run_dir import RunDir
from turnwise.storage.trajectories import read_rows
from turnwise.types import CallRecord, Message, Remark, Role, ToolCall, Trajectory, Turn
from turnwise.web.call_images import CallImages, target_boxes
from turnwise.web.columns import clean_text
from turnwise.web.configs import read_config
from turnwise.web.json_values import DEEPEST, plain, plain_text
from turnwise.web.pictures import Pictures
from turnwise.web.probes import counterparts
from turnwise.web.replays import replay_of
from turnwise.web.table import NotThere, Table

Json = dict[str, Any]
VERDICT_WORDS = ("verdict", "judge", "reason", "rationale", "critique", "explanation", "feedback", "note", "notes")
_MOST_VERDICTS = 100
_CLOSE = 1e-6


def conversation(run: RunDir, table: Table, shard: str, row: int, *, name: str | None = None) -> Json:
    """The JSON of a trajectory's page; NotThere for a shard or row that is not there."""
    entry = table.entry(shard, row)
    trajectory = read_trajectory(table, shard, row)
    pictures = Pictures(run, name)
    sample, check = trajectory.sample, trajectory.render_check
    last = table.shard_size(shard) - 1
    drawn = CallImages(pictures, sample)
    remarks = _turn_remarks(trajectory)
    return {
        "shard": shard,
        "row": row,
        "entry": entry,
        "neighbours": {"previous": row - 1 if row > 0 else None, "next": row + 1 if row < last else None},
        "siblings": table.siblings(shard, entry["sample_id"]),
        "prompt": [message_json(message, pictures) for message in trajectory.prompt],
        "turns": [_turn_json(turn, pictures, drawn, remarks) for turn in trajectory.turns],
        "branches": [
            {
                "name": clean_text(branch.name),
                "trained": branch.trained,
                "prompt": [message_json(message, pictures) for message in branch.prompt],
                "turns": [_turn_json(turn, pictures, drawn, remarks) for turn in branch.turns],
            }
            for branch in trajectory.branches
        ],
        "reward": plain(trajectory.reward),
        "parts": plain(trajectory.parts),
        **_reward_json(trajectory, weights_of(run)),
        "verdicts": verdicts(trajectory),
        "stop_reason": trajectory.stop_reason.value,
        "failure": plain(trajectory.failure),
        "reused_from": trajectory.reused_from,
        "ground_truth": plain(sample.ground_truth),
        "info": plain(sample.info),
        "artifacts": plain(trajectory.artifacts),
        "images": pictures.references(sample.images),
        "sources": drawn.sources(),
        "targets": target_boxes(sample),
        "probes": counterparts(run, table, shard, row),
        "tokens": _token_counts(trajectory),
        "render_check": check
        and {"exact": check.exact, "same_text": check.same_text, "position": plain(check.position)},
        "replay": plain(replay_of(run)),
    }


def read_trajectory(table: Table, shard: str, row: int) -> Trajectory:
    """One trajectory from its file, read alone."""
    return read_all(table, shard, [row])[0]


def read_all(table: Table, shard: str, rows: list[int]) -> list[Trajectory]:
    """Trajectories from one file; NotThere when the file is shorter than the index says."""
    path = table.path(shard)
    try:
        return read_rows(path, rows, unread=True)
    except IndexError as error:
        raise NotThere(f"{shard} was written anew: {error}") from error


def message_json(message: Message, pictures: Pictures) -> Json:
    """A message as the page wants it."""
    return {
        "role": message.role.value,
        "text": clean_text(message.text),
        "reasoning": plain_text(message.reasoning),
        "answer": plain_text(message.answer),
        "name": plain_text(message.name),
        "tool_call_id": plain_text(message.tool_call_id),
        "tool_calls": [_call_json(call) for call in message.tool_calls],
        "images": pictures.references(message.images),
    }


def _call_json(call: ToolCall) -> Json:
    return {
        "id": clean_text(call.id),
        "name": clean_text(call.name),
        "arguments": plain(call.arguments),
        "problem": plain_text(call.problem),
    }


def _turn_json(turn: Turn, pictures: Pictures, drawn: CallImages, remarks: Mapping[int, list[Json]]) -> Json:
    replies = {reply.tool_call_id: reply for reply in turn.replies if reply.role is Role.TOOL}
    answered = {record.call.id for record in turn.calls}
    others = [reply for reply in turn.replies if reply.role is not Role.TOOL or reply.tool_call_id not in answered]
    return {
        "index": turn.index,
        "message": message_json(turn.message, pictures),
        "finish_reason": turn.finish_reason.value,
        "policy_version": turn.policy_version,
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "generate_seconds": plain(turn.generate_seconds),
        "reply_seconds": plain(turn.reply_seconds),
        "user_score": plain(turn.user_score),
        "scores": plain(turn.scores),
        "remarks": remarks.get(turn.index, []),
        "calls": [_record_json(record, replies.get(record.call.id), pictures, drawn) for record in turn.calls],
        "replies": [message_json(reply, pictures) for reply in others],
        "replied": [_place(reply, turn.calls, others) for reply in turn.replies],
    }


def _place(reply: Message, calls: list[CallRecord], others: list[Message]) -> tuple[str, int]:
    """Where a reply stands in a turn's JSON; what was replied keeps its order there."""
    for at, other in enumerate(others):
        if other is reply:
            return "replies", at
    return "calls", next(at for at, record in enumerate(calls) if record.call.id == reply.tool_call_id)


def _record_json(record: CallRecord, reply: Message | None, pictures: Pictures, drawn: CallImages) -> Json:
    return _call_json(record.call) | {
        "status": record.status.value,
        "seconds": plain(record.seconds),
        "truncated": record.truncated,
        "score": plain(record.score),
        "info": plain(record.info),
        "reply": None if reply is None else message_json(reply, pictures),
        "images": drawn.images(record, reply),
    }


def _reward_json(trajectory: Trajectory, weights: Mapping[str, float]) -> Json:
    steps = waterfall(trajectory, weights)
    return {"waterfall": measured(trajectory) if steps is None else steps, "additive": steps is not None}


def waterfall(trajectory: Trajectory, weights: Mapping[str, float]) -> list[Json] | None:
    """The reward's weighted parts in order with the running total; None when the reward is not their sum.

    Many scorers measure more than they add up (whether the form was right, say): no bar may then claim to be a share.
    """
    steps, total = [], 0.0
    for name, value in trajectory.parts.items():
        share = weights.get(name, 1.0) * value
        if math.isfinite(share):
            total += share
            steps.append({"name": clean_text(name), "value": plain(share), "total": plain(total)})
    reward = trajectory.reward
    if reward is None or not math.isfinite(reward) or abs(reward - total) > _CLOSE * max(1.0, abs(reward)):
        return None
    return steps


def measured(trajectory: Trajectory) -> list[Json]:
    """The parts as they were measured, each on its own."""
    found = {name: value for name, value in trajectory.parts.items() if math.isfinite(value)}
    return [{"name": clean_text(name), "value": value, "total": value} for name, value in found.items()]


def weights_of(run: RunDir) -> dict[str, float]:
    """`scoring.weights` of the run; empty for a run whose config does not say."""
    prefix, found = "scoring.weights.", {}
    try:
        values = read_config(run)[1]
    except StorageError:  # a run that another program made need not have a config of ours
        return {}
    for key, text in values.items():
        if key.startswith(prefix):
            with contextlib.suppress(ValueError):
                found[key.removeprefix(prefix)] = float(text)
    return found


def verdicts(trajectory: Trajectory) -> list[Json]:
    """What judges said of the whole, and what they and simulated users left in artifacts and calls' info."""
    of_turns = {turn.index for turn in trajectory.every_turn}
    found = [(_remark_name(remark), remark.text) for remark in trajectory.remarks if remark.turn not in of_turns]
    found += _words(trajectory.artifacts, "", 0, is_verdict=False)
    for turn in trajectory.every_turn:
        for record in turn.calls:
            found += _words(record.info, f"turn {turn.index}, {record.call.name}", 0, is_verdict=False)
    return [{"name": clean_text(name), "text": plain(text)} for name, text in found[:_MOST_VERDICTS]]


def _turn_remarks(trajectory: Trajectory) -> dict[int, list[Json]]:
    """What judges said of single turns, with their grades, by turn."""
    found: dict[int, list[Json]] = {}
    for remark in trajectory.remarks[:_MOST_VERDICTS]:
        if remark.turn is not None:
            told = {"by": clean_text(remark.by), "text": plain(remark.text), "value": plain(remark.value)}
            found.setdefault(remark.turn, []).append(told)
    return found


def _remark_name(remark: Remark) -> str:
    about = "" if remark.turn is None else f"turn {remark.turn}, "
    return f"{about}{remark.by}" + ("" if remark.value is None else f", {remark.value:g}")


def _words(value: Any, path: str, depth: int, *, is_verdict: bool) -> Iterator[tuple[str, str]]:
    """Texts under a key that names a judgement, with the way to them."""
    if isinstance(value, str):
        if is_verdict and value.strip():
            yield path, value
    elif isinstance(value, dict) and depth < DEEPEST:
        for key, entry in value.items():
            words = str(key).lower().replace("-", "_").split("_")
            here = f"{path}, {key}" if path else str(key)
            yield from _words(
                entry, here, depth + 1, is_verdict=is_verdict or any(word in VERDICT_WORDS for word in words)
            )
    elif isinstance(value, list) and depth < DEEPEST:
        for number, entry in enumerate(value, start=1):
            yield from _words(entry, f"{path} {number}", depth + 1, is_verdict=is_verdict)


def _token_counts(trajectory: Trajectory) -> Json:
    """Tokens by origin; of an endpoint only what it counted itself."""
    if not trajectory.segments:
        return {"policy": sum(turn.completion_tokens for turn in trajectory.every_turn)}
    counts = origin_counts(trajectory.segments)
    return {origin.name.lower(): count for origin, count in counts.items()} | {"segments": len(trajectory.segments)}
