"""Rows that were made elsewhere: the file and its index are those of a run that makes them itself."""

import gc
import random
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np

from turnwise.ledger import TokenTrainingData
from turnwise.storage import index
from turnwise.storage.trajectories import made_rows
from turnwise.storage.trajectories.files import words_batch, write_trajectories
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Image,
    Ledger,
    Message,
    Origin,
    Remark,
    Role,
    Sample,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)


def played(number: int) -> Trajectory:
    call = ToolCall("c", "calculate", {"expression": f"{number}+1"})
    said = Message(Role.ASSISTANT, f"is it {number}?", (call,), answer=f"{number}")
    reply = Message(Role.TOOL, str(number + 1), tool_call_id="c", name="calculate")
    sample = Sample(f"s{number}", (Message(Role.USER, f"what is {number}?"),), "arithmetic", ground_truth=number)
    ledger = Ledger()
    ledger.append([1, number], Origin.PROMPT, 0)
    ledger.append([number] * (1 + number % 3), Origin.POLICY, 0, [-0.5] * (1 + number % 3), 0)
    turn = Turn(0, said, FinishReason.STOP, 0, 2, 1, calls=[CallRecord(call, CallStatus.OK, 0.1)], replies=[reply])
    messages = [*sample.prompt, said, reply]
    return Trajectory(sample, number % 4, 0, messages, [turn], [ledger], StopReason.ANSWERED, 0.1 * number, reward=0.0)


def learned(trajectories: list[Trajectory]) -> None:
    """What comes after the rows were made."""
    for number, each in enumerate(trajectories):
        each.advantage, each.first_right, each.reward, each.parts = 0.5 - number, number % 2 == 0, 1.0, {"acc": 1.0}
        each.segments[0].training = TokenTrainingData(entropies=np.full(len(each.segments[0]), 0.25))
    trajectories[3].failure, trajectories[3].reward, trajectories[3].reused_from = "stale", None, 2
    trajectories[4].remarks.append(Remark("judge", "good"))


def test_a_file_of_made_rows_is_the_file_to_the_last_byte(tmp_path: Path):
    here, there = ([played(number) for number in range(150)] for _ in range(2))
    order = list(range(140))  # the last ten were not made yet
    random.Random(0).shuffle(order)
    for start in range(0, 140, 32):
        some = [there[number] for number in order[start : start + 32]]
        content = made_rows.encoded(some, words_batch)
        assert content is not None
        made_rows.keep(some, content, [index.lasting_entry(each) for each in some])
    assert made_rows.entry_of(there[0]) is not None and made_rows.entry_of(there[149]) is None
    files = tmp_path / "here.parquet", tmp_path / "there.parquet"
    for file, trajectories in zip(files, (here, there), strict=True):
        learned(trajectories)
        write_trajectories(file, trajectories)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert index.shard_of("x", here) == index.shard_of("x", there)
    alive = [weakref.ref(each) for each in there]
    assert sum(name in made_rows._made for name in map(id, there)) == 140
    del there, some, trajectories
    gc.collect()
    assert not any(one() for one in alive) and all(row.trajectory() is not None for row in made_rows._made.values())


def test_rows_are_made_elsewhere_only_where_nothing_in_them_can_change():
    plain = played(1)
    assert made_rows.is_plain(plain)
    assert not made_rows.is_plain(replace(plain, sample=replace(plain.sample, images=(Image("a.png"),))))
    drawn = replace(plain.turns[0].calls[0], info={"images": [{"data": "data:image/png;base64,"}]})
    assert not made_rows.is_plain(replace(plain, turns=[replace(plain.turns[0], calls=[drawn])]))
    odd = replace(plain, sample=replace(plain.sample, ground_truth=object()))
    assert made_rows.encoded([odd], words_batch) is None
