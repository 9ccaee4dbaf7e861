"""A dumped row as a trajectory: its conversation, its tokens where the dump has them, and a list of what it lacks."""

import hashlib
import itertools
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.chat.formats import hermes
from turnwise.errors import DataError
from turnwise.ext.verl.dumps.dialogue import ENDS, DumpPrompt, Markers, Utterance, messages_of, read_output, read_prompt
from turnwise.ext.verl.dumps.rows import DumpRow, TokenColumns
from turnwise.ledger import TokenTrainingData
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Image,
    Ledger,
    Message,
    Origin,
    Role,
    Sample,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)

UNKNOWN_SOURCE = "unknown"
MOST_TEXTS = 1_000_000
"""Different token texts a run may have; more than any vocabulary, so what has more are no tokens."""
_REPLY_ORIGINS = {Role.TOOL: Origin.TOOL, Role.USER: Origin.USER}
_SPECIAL = re.compile(r"<\|?[A-Za-z0-9_/]{1,40}\|?>")
_RM_RESPONSE = "rm_response"  # what the reward model wrote
_BROKEN = "\ufffd"  # what a tokenizer gives for a part of a character


@dataclass(slots=True)
class Vocabulary:
    """Made-up ids for token texts, in the order they are met."""

    ids: dict[str, int] = field(default_factory=dict)

    def of(self, text: str) -> int:
        """The id of a text, the next free one if it is new."""
        number = self.ids.setdefault(text, len(self.ids))
        if number >= MOST_TEXTS:
            raise DataError(f"more than {MOST_TEXTS:,} different response_tokens: these are not tokens")
        return number

    def texts(self) -> list[str]:
        """The texts in the order of their ids."""
        return list(self.ids)


@dataclass(slots=True)
class Translator:
    """Rows of one run as trajectories, in order; `notes` counts what had to be left out."""

    images: Path | None = None
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    markers: Counter[Markers] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def trajectory(self, row: DumpRow, sibling: int) -> Trajectory:
        """Nothing is invented: what the dump does not say is None or empty, and named in the artifacts."""
        opening = read_prompt(row.prompt)
        pieces = read_output(row.output, opening.markers)
        self.markers[opening.markers] += 1
        turns = _turns(pieces, opening, row.step)
        ledger = self._ledger(row, pieces, turns) if row.tokens is not None and row.tokens.texts else None
        cut = _was_cut(row.tokens, opening.markers)
        unsaid = ["seconds", "advantage"] + (["tokens"] if ledger is None else ["prompt tokens"])
        if cut is None:
            unsaid += ["finish_reason", "stop_reason"]
        if any(turn.calls for turn in turns):
            unsaid.append("status and seconds of tool calls")
        if cut is not None:
            turns[-1].finish_reason = FinishReason.LENGTH if cut else FinishReason.STOP
        artifacts: dict[str, Any] = {"imported": {"markers": opening.markers.value, "unsaid": unsaid}}
        if _RM_RESPONSE in row.info:
            artifacts["judge"] = {_RM_RESPONSE: row.info[_RM_RESPONSE]}
        sample = self._sample(row, opening)
        replies = [message for turn in turns for message in (turn.message, *turn.replies)]
        return Trajectory(
            sample=sample,
            sibling=sibling,
            step=row.step,
            messages=[*sample.prompt, *replies],
            turns=turns,
            segments=[] if ledger is None else [ledger],
            stop_reason=_stop_reason(turns[-1], cut),
            seconds=0.0,
            artifacts=artifacts,
            reward=row.reward,
            parts=dict(row.parts),
        )

    def _sample(self, row: DumpRow, opening: DumpPrompt) -> Sample:
        images = []
        for name in row.images:
            path = None if self.images is None else _inside(self.images, name)
            if path is None:
                self.notes["images left out"] += 1
            else:
                images.append(Image(str(path)))
        info = {name: value for name, value in row.info.items() if name != _RM_RESPONSE}
        info |= {"prefill": opening.prefill} if opening.prefill.strip() else {}
        source = row.data_source or UNKNOWN_SOURCE
        return Sample(sample_id(row), opening.messages, source, row.ground_truth, images=tuple(images), info=info)

    def _ledger(self, row: DumpRow, pieces: list[Utterance], turns: list[Turn]) -> Ledger | None:
        tokens = row.tokens
        assert tokens is not None  # asked by the only caller
        whole = len(pieces) == 1
        places = [0] * len(tokens.texts) if whole else _places(tokens.texts, row.output)
        if places is None:
            self.notes["token lists left out (they do not spell an output of several turns)"] += 1
            return None
        owners = [(Origin.POLICY, 0)] * len(places) if whole else _owners(places, pieces)
        ledger = Ledger()
        for (origin, turn), run in itertools.groupby(range(len(owners)), key=owners.__getitem__):
            here = list(run)
            policy = origin is Origin.POLICY
            if policy and (not turns[turn].completion_tokens):
                turns[turn].start = len(ledger)
            logprobs = [tokens.logprobs[n] if tokens.logprobs else math.nan for n in here] if policy else None
            version = turns[turn].policy_version if policy else None
            ledger.append([self.vocabulary.of(tokens.texts[n]) for n in here], origin, turn, logprobs, version)
            turns[turn].completion_tokens += len(here) if policy else 0
        columns = (tokens.ref_logprobs, tokens.values, tokens.rewards)
        if any(column is not None for column in columns):
            ref, values, rewards = (_on_policy(column, ledger) for column in columns)
            ledger.training = TokenTrainingData(ref_logprobs=ref, values=values, rewards=rewards)
        return ledger


def sample_id(row: DumpRow) -> str:
    """The dump's own id of the prompt, or one made from its text: equal prompts are one sample."""
    if row.uid is not None:
        return row.uid
    return "prompt-" + hashlib.blake2b(row.prompt.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _turns(pieces: list[Utterance], opening: DumpPrompt, step: int) -> list[Turn]:
    """One turn per answer, with the replies that follow it."""
    turns: list[Turn] = []
    for piece in pieces:
        if piece.role is Role.ASSISTANT:
            index = len(turns)
            message = hermes.parse(piece.text, turn=index, in_reasoning=opening.in_reasoning and index == 0)
            turns.append(Turn(index, message, FinishReason.UNKNOWN, step, prompt_tokens=0, completion_tokens=0))
        else:
            turns[-1].replies += messages_of(piece)
    for turn in turns:
        _match_replies(turn)
    for turn in turns[:-1]:
        turn.finish_reason = FinishReason.STOP  # something followed
    return turns


def _match_replies(turn: Turn) -> None:
    """Calls and replies are paired in order. A call without a reply was, as far as the dump says, never run."""
    calls = turn.message.tool_calls
    replies = [n for n, reply in enumerate(turn.replies) if reply.role is Role.TOOL]
    # With fewer replies than calls, those that could not be read got none: verl drops them.
    matched = [call for call in calls if call.problem is None or len(replies) >= len(calls)]
    answered: dict[str, ToolCall] = {}
    for index, call in zip(replies, matched, strict=False):
        reply = turn.replies[index]
        turn.replies[index] = Message(Role.TOOL, reply.content, tool_call_id=call.id, name=call.name or None)
        answered[call.id] = call
    for call in calls:
        if call.problem is not None:
            turn.calls.append(CallRecord(call, CallStatus.MALFORMED, 0.0))
        elif call.id in answered:
            turn.calls.append(CallRecord(call, CallStatus.UNKNOWN, 0.0))


def _was_cut(tokens: TokenColumns | None, markers: Markers) -> bool | None:
    """Whether the last answer lacks its end token; None where special tokens are not in the dump."""
    if tokens is None or not tokens.texts or markers not in (Markers.CHATML, Markers.LLAMA3):
        return None
    return tokens.texts[-1].strip() not in ENDS


def _stop_reason(last: Turn, cut: bool | None) -> StopReason:
    """What can be read off: cut short, or answered to the end with nothing left open; else the dump does not say."""
    if cut:
        return StopReason.TURN_TRUNCATED
    open_call = any(call.problem is None for call in last.message.tool_calls)
    return StopReason.ANSWERED if cut is False and not last.replies and not open_call else StopReason.UNKNOWN


def _places(texts: list[str], output: str) -> list[int] | None:
    """Where each token's text begins in the output; None when they do not spell it."""
    places: list[int] = []
    position = 0
    while len(places) < len(texts):
        text = texts[len(places)]
        if output.startswith(text, position):
            places.append(position)
            position += len(text)
        elif output.startswith(" " + text, position):  # some tokenizers drop the space before a word
            places.append(position)
            position += len(text) + 1
        elif _BROKEN in text:
            first = len(places)
            after = next((n for n in range(first, len(texts)) if texts[n] and _BROKEN not in texts[n]), len(texts))
            if after == len(texts):
                return places + [position] * (after - first)
            lead = len(text.split(_BROKEN)[0])  # whole characters before the broken one, which is at least one more
            reach = position + sum(len(texts[n]) for n in range(first, after)) + len(texts[after])
            next_start = output.find(texts[after], position + lead + 1, reach)
            if next_start < 0:
                return None
            places += [position] * (after - first)
            position = next_start
        elif _SPECIAL.fullmatch(text):  # the output was written without special tokens
            places.append(position)
        else:
            return None
    return places if not output[position:].strip() else None


def _owners(places: list[int], pieces: list[Utterance]) -> list[tuple[Origin, int]]:
    """Who wrote the token that begins at each place, and in which turn."""
    owners: list[tuple[Origin, int]] = []
    number, turn = 0, 0
    for start in places:
        while number + 1 < len(pieces) and start >= pieces[number + 1].start:
            number += 1
            turn += pieces[number].role is Role.ASSISTANT
        piece = pieces[number]
        # The end mark of an answer is the policy's own token.
        until = piece.until if piece.role is Role.ASSISTANT else piece.end
        origin = Origin.POLICY if piece.role is Role.ASSISTANT else _REPLY_ORIGINS.get(piece.role, Origin.TEMPLATE)
        if piece.role is Role.USER and "<tool_response>" in piece.text:
            origin = Origin.TOOL
        owners.append((origin if piece.start <= start < until else Origin.TEMPLATE, turn))
    return owners


def _on_policy(column: list[float] | None, ledger: Ledger) -> NDArray[Any] | None:
    if column is None:
        return None
    return np.where(ledger.loss_mask, np.array(column, dtype=np.float64), 0.0)


def _inside(folder: Path, name: str) -> Path | None:
    """The image file of this name in the folder; None when it is not there or leads out of it."""
    try:
        path = (folder / name).resolve()
        return path if path.is_relative_to(folder.resolve()) and path.is_file() else None
    except (OSError, ValueError, RuntimeError):  # a name that is no path: too long, a zero byte, a loop of links
        return None
