"""Trajectories, a plug-in file with scorers of every kind, and real reward servers."""

import textwrap
from pathlib import Path

import pytest

from turnwise.types import FinishReason, Ledger, Message, Origin, Role, Sample, StopReason, Trajectory, Turn

SCORERS = """
import math

from turnwise.errors import DataError, ScoringFailed
from turnwise.scoring.scorer import Score
from turnwise.scoring.client_options import client_options
from turnwise.types import Remark


class Odd(KeyError):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


async def number(trajectory):
    return int(trajectory.sample.ground_truth) / 7


@client_options("scale", "shift")
def sync_number(trajectory, *, scale=1.0, shift=0.0):
    return scale * int(trajectory.sample.ground_truth) + shift


async def parts(trajectory):
    index = int(trajectory.sample.ground_truth)
    return {"score": index, "even": index % 2 == 0} if index % 3 else {"a": 0.1, "b": index}


async def whole(trajectory):
    index = int(trajectory.sample.ground_truth)
    return Score(index, {"acc": 1.0}, {turn.index: {"tool": turn.index + 0.1 * index} for turn in trajectory.turns})


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str.endswith(ground_truth)), "turns": extra_info["num_turns"], "text": data_source}


async def remarked(trajectory):
    index = int(trajectory.sample.ground_truth)
    return Score(index, remarks=(Remark("me", f"{index} \u00e9", 0.5), Remark("you", "no", turn=1)))


async def value_error(trajectory):
    raise ValueError("no such thing")


async def odd(trajectory):
    raise Odd("this", "that")


async def unicode_error(trajectory):
    return b"\\xff".decode()


async def data_error(trajectory):
    raise DataError("row 3: bad truth \\ud800")


async def not_finite(trajectory):
    return math.inf


async def not_a_number(trajectory):
    return "1.0"


async def wrong_turn(trajectory):
    return Score(1.0, {}, {7: {"tool": 1.0}})


async def broken_service(trajectory):
    raise ScoringFailed("the judge is down")
"""


def make_trajectory(index: int, sibling: int = 0) -> Trajectory:
    """Two turns of an episode whose ground truth is its index."""
    prompt = (Message(Role.USER, f"what is {index}? é\ud800"),)
    turns = [
        Turn(0, Message(Role.ASSISTANT, "hm"), FinishReason.STOP, 0, 2, 1, 0, 2, replies=[Message(Role.USER, "so?")]),
        Turn(1, Message(Role.ASSISTANT, f"#### {index}"), FinishReason.STOP, 0, 4, 1, 0, 4),
    ]
    ledger = Ledger()
    ledger.append([1, 2], Origin.PROMPT, 0)
    ledger.append([3], Origin.POLICY, 0, [-0.1], 0)
    ledger.append([4], Origin.USER, 0)
    ledger.append([5], Origin.POLICY, 1, [float("-inf")], 0)
    sample = Sample(f"s{index}", prompt, "arithmetic", str(index), info={"extra_info": {"index": index}})
    messages = [*prompt, *(said for turn in turns for said in (turn.message, *turn.replies))]
    return Trajectory(sample, sibling, 0, messages, turns, [ledger], StopReason.ANSWERED, 1.0)


@pytest.fixture
def trajectory():
    return make_trajectory


def write_scorers(path: Path, text: str) -> str:
    path.write_text(textwrap.dedent(text))
    return str(path)


@pytest.fixture
def scorers(tmp_path):
    return write_scorers(tmp_path / "rewards.py", SCORERS)


@pytest.fixture
def plugin(tmp_path):
    """Writes scorers of a test's own; the path to name them by."""
    return lambda text: write_scorers(tmp_path / "own_rewards.py", text)
