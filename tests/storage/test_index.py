"""The index: every trajectory in short, one line a file, equal to what the file itself says."""

import json
import math

import pytest

from turnwise.errors import StorageError
from turnwise.ledger import TokenTrainingData
from turnwise.storage.index import COLUMNS, entry_of, parse_line, record, shard_of
from turnwise.storage.run_dir import RunDir
from turnwise.storage.trajectories.files import read_rows, read_texts, read_trajectories
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Ledger,
    Message,
    Origin,
    RenderCheck,
    Role,
    Sample,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)


def trajectory(number=0, **changes):
    """A tool call that works, one that cannot be read, feedback, and an answer."""
    ask, feedback = Message(Role.USER, "What is 12\n times 34?"), Message(Role.USER, "Are you sure?")
    first = Turn(
        0, Message(Role.ASSISTANT, "calling"), FinishReason.STOP, 3, 5, 2, generate_seconds=0.2,
        calls=[
            CallRecord(ToolCall("a", "python", {"code": "12*34"}), CallStatus.OK, 0.5),
            CallRecord(ToolCall("b", "", {}, problem="no JSON"), CallStatus.MALFORMED, 0.0),
        ],
        replies=[Message(Role.TOOL, "408", tool_call_id="a"), Message(Role.TOOL, "error", tool_call_id="b"), feedback],
    )  # fmt: skip
    second = Turn(1, Message(Role.ASSISTANT, "It is 408."), FinishReason.STOP, 4, 9, 2)
    ledger = Ledger()
    ledger.append([1, 2], Origin.PROMPT, 0)
    ledger.append([3, 4], Origin.POLICY, 0, [-0.5, -1.0], 0)
    ledger.append([5], Origin.TOOL, 0)
    ledger.append([6, 7], Origin.POLICY, 1, [-0.125, -0.25], 0)
    ledger.training = TokenTrainingData(
        logprobs=[0, 0, -0.5, -1.5, 0, -0.125, -0.25],
        entropies=[0, 0, 1.0, 3.0, 0, math.nan, 2.0],
        advantages=[0.0] * 7,
    )
    values = {
        "sample": Sample(f"test:{number}", (ask,), "arithmetic", ground_truth="408"),
        "sibling": number,
        "step": -1,
        "messages": [ask, first.message, *first.replies, second.message],
        "turns": [first, second],
        "segments": [ledger],
        "stop_reason": StopReason.ANSWERED,
        "seconds": 1.5,
        "render_check": RenderCheck(True, True),
        "reward": 1.1,
        "parts": {"acc": 1.0, "format": 0.1},
        "advantage": 0.7,
        "first_right": False,
    }
    return Trajectory(**values | changes)


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path, "a", "train")


def test_an_entry_says_what_happened():
    found = entry_of(trajectory(), 12)
    assert (found.step, found.sample_id, found.data_source, found.question) == (
        12,
        "test:0",
        "arithmetic",
        "What is 12 times 34?",
    )
    assert (found.right, found.first_right, found.reward, found.parts) == (
        True,
        False,
        1.1,
        {"acc": 1.0, "format": 0.1},
    )
    assert (found.turns, found.user_turns, found.policy_tokens, found.tokens, found.prompt_tokens) == (2, 1, 4, 7, 5)
    assert (found.calls, found.failed_calls, found.malformed, found.tools) == (2, 1, 1, ["python"])
    assert (found.called, found.ran, found.evidence, found.used) == (True, True, True, True)
    assert found.gap == pytest.approx(0.5 / 4) and found.entropy == pytest.approx(2.0)
    assert (found.truncated, found.exact, found.policy_version, found.answer) == (False, True, 3, "It is 408.")


def test_an_empty_failed_episode_has_an_entry():
    found = entry_of(
        trajectory(turns=[], segments=[], messages=[], reward=None, parts={}, advantage=None, render_check=None,
                   stop_reason=StopReason.FAILED, failure="the sandbox failed", first_right=None), 1,
    )  # fmt: skip
    assert (found.right, found.gap, found.entropy, found.exact, found.called, found.answer) == (
        None,
        None,
        None,
        None,
        False,
        "",
    )
    assert found.failure == "the sandbox failed"


def test_the_line_says_what_the_file_says(run):
    found = [trajectory(number) for number in range(3)]
    record(run, "trajectories/step_000012.parquet", found)
    line = (run.path / "index.jsonl").read_bytes()
    stored = read_trajectories(run.path / "trajectories/step_000012.parquet")
    assert parse_line(line) == shard_of("trajectories/step_000012.parquet", stored)
    shard = parse_line(line)
    assert shard.size == 3 and shard.columns["step"] == [12] * 3
    assert shard.tools["python"].statuses == {"ok": 3} and shard.tools["python"].p50 == 0.5
    assert shard.tools[""].statuses == {"malformed": 3}


def test_numbers_that_json_lacks_are_left_out(run):
    odd = trajectory(reward=math.nan, parts={"acc": math.inf, "format": 0.5}, advantage=-math.inf)
    record(run, "eval/step_000000.parquet", [odd])
    shard = parse_line((run.path / "index.jsonl").read_bytes())
    assert (shard.columns["reward"], shard.columns["parts"], shard.columns["advantage"]) == (
        [None],
        [{"format": 0.5}],
        [None],
    )


def test_half_of_a_surrogate_pair_does_no_harm(run):
    odd = trajectory(sample=Sample("a\ud800", (Message(Role.USER, "x\udc80y"),), "s"))
    record(run, "eval/step_000000.parquet", [odd])
    assert parse_line((run.path / "index.jsonl").read_bytes()).size == 1


@pytest.mark.parametrize(
    "line",
    ["", "{}", "[]", "null", '{"file": "x", "columns": {}, "tools": {}}', '{"file": "x", "columns": 3, "tools": {}}'],
)
def test_a_damaged_line_is_an_error_that_says_so(line):
    with pytest.raises(StorageError, match=r"index\.jsonl is damaged"):
        parse_line(line)


def test_columns_of_different_lengths_are_damage():
    line = {"file": "x", "tools": {}, "columns": {name: [0] for name in COLUMNS} | {"reward": []}}
    with pytest.raises(StorageError, match="damaged"):
        parse_line(json.dumps(line))


def test_some_rows_are_read_without_the_others(run):
    found = [trajectory(number) for number in range(150)]
    record(run, "eval/step_000003.parquet", found)
    path = run.path / "eval/step_000003.parquet"
    assert [t.sibling for t in read_rows(path, [149, 0, 70, 70])] == [149, 0, 70, 70]
    assert repr(read_rows(path, [64])) == repr([read_trajectories(path)[64]])  # repr: nan equals nan
    assert read_rows(path, []) == []
    for row in (150, -1):
        with pytest.raises(IndexError, match="holds 150"):
            read_rows(path, [row])


def test_texts_are_those_of_the_messages(run):
    record(run, "eval/step_000003.parquet", [trajectory()])
    found = read_texts(run.path / "eval/step_000003.parquet")
    assert found == [["What is 12\n times 34?", "calling", "408", "error", "Are you sure?", "It is 408."]]


def test_learned_numbers_come_back_and_must_fit(run):
    record(run, "eval/step_000003.parquet", [trajectory()])
    ledger = read_trajectories(run.path / "eval/step_000003.parquet")[0].segments[0]
    assert ledger.training is not None and ledger.training.logprobs.tolist() == [
        0,
        0,
        -0.5,
        -1.5,
        0,
        -0.125,
        -0.25,
    ]
    assert ledger.training.values is None and math.isnan(ledger.training.entropies[5])
    broken = trajectory()
    broken.segments[0].training = TokenTrainingData(values=[1.0])
    with pytest.raises(StorageError, match="1 training values for 7 tokens"):
        record(run, "eval/step_000004.parquet", [broken])
    assert not (run.path / "eval/step_000004.parquet").exists()
