"""One trajectory as a page shows it: turns with calls and replies, images with crops, the reward step by step."""

import base64
import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

from turnwise.errors import DataError, StorageError
from turnwise.ext.board.images import Pictures, source_label
from turnwise.ext.board.json_values import DEEPEST, clean_text, plain, plain_text
from turnwise.ext.board.probes import counterparts
from turnwise.ext.board.replays import replay_of
from turnwise.ext.board.table import NotThere, Table
from turnwise.storage.configs import read_config
from turnwise.storage.images.copies import images_for
from turnwise.storage.images.reader import stored_name
from turnwise.storage.run_dir import RunDir
from turnwise.storage.trajectories.files import read_rows
from turnwise.storage.trajectories.ledger_columns import origin_counts
from turnwise.system.image_sources import kept_name
from turnwise.types import CallRecord, Image, Message, Remark, Role, Sample, ToolCall, Trajectory, Turn, first_prompt

Json = dict[str, Any]

MOST_TARGETS = 64
_VERIFIED = "verified"


class CallImages:
    """The pictures of one episode's calls, each with the part of which source it shows."""

    def __init__(self, pictures: Pictures, sample: Sample) -> None:
        self._pictures = pictures
        self._sample = sample
        self._known: dict[str, dict[str, str | None]] = {}
        """By tool, and by the name that the tool's session has for it."""

    def images(self, record: CallRecord, reply: Message | None) -> list[Json]:
        """Those that a call's info tells of; else those its reply shows."""
        reply_images = [] if reply is None else list(reply.images)
        recorded = record.info.get("images")
        recorded = [entry for entry in recorded if isinstance(entry, dict)] if isinstance(recorded, list) else []
        if recorded:
            same = len(recorded) == len(reply_images)  # then the reply shows them in this order
            sources = self._sources_of(record.call.name)
            return [
                self._recorded(entry, reply_images[number] if same else None, sources)
                for number, entry in enumerate(recorded)
            ]
        return [self._shown(image) for image in reply_images]

    def sources(self) -> list[Json]:
        """The images that tools read, each once: `[{"name", "url"}]`. Those that the prompt shows are among them."""
        tools = list(self._sample.tools_kwargs) or [""]  # a tool of which the row says nothing reads its images
        names = {url: name for tool in tools for name, url in self._sources_of(tool).items()}
        return [{"name": clean_text(name), "url": url} for url, name in names.items() if url is not None]

    def _sources_of(self, tool: str) -> dict[str, str | None]:
        if tool not in self._known:
            try:
                images = images_for(self._sample, self._sample.tools_kwargs.get(tool, {}))
            except DataError:  # another tool's word for something else
                images = {}
            self._known[tool] = {name: self._pictures.url(image.source) for name, image in images.items()}
        return self._known[tool]

    def _recorded(self, entry: Json, image: Image | None, sources: dict[str, str | None]) -> Json:
        url = self._pictures.file_url(entry.get("file"))
        if url is None and isinstance(entry.get("data"), str):
            url = self._pictures.url(entry["data"])
        reply_url = None if image is None else self._pictures.url(image.source)
        provenance = plain_text(str(entry.get("provenance") or "")) or None
        claim = entry.get("unverified")
        claimed = isinstance(claim, dict) or provenance not in (None, _VERIFIED)
        details = claim if isinstance(claim, dict) else entry
        source = details.get("source")
        steps = details.get("steps")
        return {
            "url": reply_url if url is None else url,
            "shown_url": None
            if url is None or reply_url is None or image is None or _is_same(entry, image)
            else reply_url,
            "name": plain_text(str(entry.get("name") or "")),
            "size": _size(entry.get("size")),
            "source_url": sources.get(source) if isinstance(source, str) else None,
            "source_size": _size(entry.get("source_size")),
            "provenance": provenance,
            "claimed": claimed,
            "box": box_of(details.get("box")),
            "matrix": None if claimed else _numbers(entry.get("matrix"), 6),
            "steps": plain(steps if isinstance(steps, list) else []),
        }

    def _shown(self, image: Image) -> Json:
        inline = kept_name(image.source) is None and image.source.startswith("data:")
        name = source_label(image.source if inline else PurePath(image.source).name)
        nothing = ("shown_url", "size", "source_url", "source_size", "provenance", "box", "matrix")
        entry: Json = dict.fromkeys(nothing)
        return entry | {"url": self._pictures.url(image.source), "name": name, "claimed": False, "steps": []}


def target_boxes(sample: Sample) -> list[list[float]]:
    """Where the evidence lies in what tools read, as the ground truth or extra_info has it; [] where neither has."""
    truth, extra = sample.ground_truth, sample.info.get("extra_info")
    holders = [holder for holder in (truth, extra) if isinstance(holder, Mapping) and "target_boxes" in holder]
    raw = holders[0]["target_boxes"] if holders else None
    boxes = [box_of(holder) for holder in raw[:MOST_TARGETS]] if isinstance(raw, list | tuple) else []
    return [box for box in boxes if box is not None]


def box_of(value: Any) -> list[float] | None:
    """[left, upper, right, lower] of a region that is not empty; None for anything else."""
    box = _numbers(value, 4)
    return box if box is not None and box[0] < box[2] and box[1] < box[3] else None


def _is_same(entry: Json, image: Image) -> bool:
    """Whether the model was shown the picture that the call's record keeps; a probe shows it another."""
    if isinstance(entry.get("data"), str):
        return bool(entry["data"] == image.source)
    if (name := kept_name(image.source)) is not None:
        return bool(name == entry.get("file"))
    head, _, data = image.source.partition(",")
    if not head.endswith(";base64"):
        return True  # a file: nothing but the tool's own word names it
    try:
        return stored_name(base64.b64decode(data, validate=True)) == entry.get("file")
    except ValueError:
        return True  # no picture, which is then what the page says


def _size(value: Any) -> list[float] | None:
    sides = _numbers(value, 2)
    return sides if sides is not None and min(sides) > 0 else None


def _numbers(value: Any, count: int) -> list[float] | None:
    if not isinstance(value, list | tuple) or len(value) != count:
        return None
    good = all(
        isinstance(number, int | float) and not isinstance(number, bool) and _is_finite(number) for number in value
    )
    return list(value) if good else None


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond any picture
        return False


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
                "prompt": [message_json(message, pictures) for message in first_prompt(branch.messages, branch.turns)],
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
        "facts": {name: plain(fact) for name, fact in asdict(trajectory.facts).items() if fact not in (None, [], {})},
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
    parts = {name: value for name, value in trajectory.parts.items() if math.isfinite(value)}
    return [{"name": clean_text(name), "value": value, "total": value} for name, value in parts.items()]


def weights_of(run: RunDir) -> dict[str, float]:
    """`scoring.weights` of the run; empty for a run whose config does not say."""
    prefix, weights = "scoring.weights.", {}
    try:
        values = read_config(run)[1]
    except StorageError:  # a run that another program made need not have a config of ours
        return {}
    for key, text in values.items():
        if key.startswith(prefix):
            with contextlib.suppress(ValueError):
                weights[key.removeprefix(prefix)] = float(text)
    return weights


def verdicts(trajectory: Trajectory) -> list[Json]:
    """What judges said of the whole, and what they and simulated users left in artifacts and calls' info."""
    of_turns = {turn.index for turn in trajectory.every_turn}
    remarks = [(_remark_name(remark), remark.text) for remark in trajectory.remarks if remark.turn not in of_turns]
    remarks += _words({"user_notes": trajectory.facts.user_notes} | trajectory.artifacts, "", 0, is_verdict=False)
    for turn in trajectory.every_turn:
        for record in turn.calls:
            remarks += _words(record.info, f"turn {turn.index}, {record.call.name}", 0, is_verdict=False)
    return [{"name": clean_text(name), "text": plain(text)} for name, text in remarks[:_MOST_VERDICTS]]


def _turn_remarks(trajectory: Trajectory) -> dict[int, list[Json]]:
    """What judges said of single turns, with their grades, by turn."""
    by_turn: dict[int, list[Json]] = {}
    for remark in trajectory.remarks[:_MOST_VERDICTS]:
        if remark.turn is not None:
            entry = {"by": clean_text(remark.by), "text": plain(remark.text), "value": plain(remark.value)}
            by_turn.setdefault(remark.turn, []).append(entry)
    return by_turn


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
