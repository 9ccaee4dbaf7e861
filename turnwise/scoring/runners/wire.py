"""What a worker or a reward server sends about a trajectory, as plain JSON values: a score, or what was raised.

Workers import this, so it imports nothing heavy; `scoring/worker_replies.py` reads it on the other side.
"""

import traceback
from dataclasses import asdict
from typing import Any

from turnwise.scoring.scorer import Score, Scorer, evaluate
from turnwise.types import Trajectory

MAX_TEXT = 20_000
"""Characters kept of an error's text and of its traceback."""
KNOWN_MODULES = ("builtins", "turnwise.errors")
"""Whose exceptions the other side has too."""

WireResult = dict[str, Any]


async def score_to_wire(scorer: Scorer, trajectory: Trajectory) -> WireResult:
    """The scorer's result, checked as `evaluate` does, or its exception."""
    try:
        return score_to_json(await evaluate(scorer, trajectory))
    except Exception as error:
        return {"error": error_to_json(error)}


def score_to_json(score: Score) -> WireResult:
    """A score; JSON has texts only as keys, so turns go by their index as text."""
    values: WireResult = {
        "reward": score.reward,
        "parts": score.parts,
        "turns": {str(turn): scores for turn, scores in score.turns.items()},
    }
    return values | ({"remarks": [asdict(remark) for remark in score.remarks]} if score.remarks else {})


def error_to_json(error: Exception) -> WireResult:
    """An exception: its name, its text, and those of its classes that the other side knows."""
    kind = type(error)
    try:
        text = str(error)
    except Exception as broken:  # a class of a plug-in, which may do anything here
        text = f"(its text cannot be read: {type(broken).__name__})"
    return {
        "module": kind.__module__,
        "name": kind.__qualname__,
        "text": _plain(text[:MAX_TEXT]),
        "bases": [[base.__module__, base.__name__] for base in kind.__mro__ if base.__module__ in KNOWN_MODULES],
        "notes": [_plain(str(note)[:MAX_TEXT]) for note in getattr(error, "__notes__", ())],
        "traceback": _plain("".join(traceback.format_tb(error.__traceback__))[-MAX_TEXT:]),
    }


def _plain(text: str) -> str:
    """A model's text, quoted in an error, may hold halves of surrogate pairs, which are no valid JSON."""
    return text.encode("utf-8", "backslashreplace").decode()
