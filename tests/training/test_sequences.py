"""Sequences are the recorded tokens; failures are left out, and arrays that do not fit are refused."""

import math
from dataclasses import replace

import numpy as np
import pytest

from turnwise.errors import DataError
from turnwise.training.optimise import replayed
from turnwise.training.packing import pack, tokens_by_trajectory
from turnwise.training.sequences import LEFT_OUT, to_sequences, trainable, write_back
from turnwise.types import (
    FinishReason,
    Group,
    Ledger,
    Message,
    Origin,
    Role,
    Sample,
    StopReason,
    Trajectory,
    Turn,
    VersionRun,
)

SAMPLE = Sample("s", (Message(Role.USER, "x"),), "d")


def ledger(version: int = 3) -> Ledger:
    made = Ledger()
    made.append([5, 6], Origin.PROMPT, 0)
    made.append([7, 8], Origin.POLICY, 0, [-0.5, -0.25], [VersionRun(4, 1), VersionRun(5, 1)])
    made.append([9], Origin.TOOL, 0)
    made.append([10], Origin.POLICY, 1, [-1.0], version)
    made.append([11], Origin.USER, 1)
    return made


def turn(index: int, segment: int, version: int) -> Turn:
    return Turn(index, Message(Role.ASSISTANT, "y"), FinishReason.STOP, version, 2, 1, segment=segment)


def trajectory(reward: float | None = 1.0, failure: str | None = None, segments: int = 1) -> Trajectory:
    turns = [turn(0, 0, 4), turn(1, 0, 3)] + [turn(n + 1, n, 7) for n in range(1, segments)]
    ledgers = [ledger(3 + segment) for segment in range(segments)]
    made = Trajectory(SAMPLE, 0, 0, [], turns, ledgers, StopReason.ANSWERED, 0.0, failure)
    made.reward = reward
    return made


def test_a_sequence_is_a_ledger_with_what_training_needs_to_know():
    (made,) = to_sequences([Group(SAMPLE, [trajectory()])])
    assert made.token_ids.tolist() == [5, 6, 7, 8, 9, 10, 11]
    assert made.loss_mask.tolist() == [False, False, True, True, False, True, False]
    assert made.logprobs.tolist() == [0.0, 0.0, -0.5, -0.25, 0.0, -1.0, 0.0]
    assert made.turns.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert (made.trajectory, made.group, made.reward) == (0, 0, 1.0)
    assert made.gather("versions").tolist() == [4, 5, 3] and made.policy_version == 3
    assert made.policy_tokens == 3 and made.gather("logprobs").tolist() == [-0.5, -0.25, -1.0]


def test_experts_are_those_of_the_pass_that_computed_a_token_last():
    one, two = trajectory(), trajectory(segments=2)
    first, second = one.turns
    first.start, first.completion_tokens = 2, 2
    second.start, second.completion_tokens = 5, 1
    first.experts = np.full((3, 1, 2), 1, dtype=np.uint8)
    second.experts = np.full((2, 1, 2), 2, dtype=np.uint8)
    sequences = to_sequences([Group(SAMPLE, [one, two])])
    assert sequences[0].experts[:, 0, 0].tolist() == [1, 1, 1, 2, 2, 255, 255]
    assert sequences[1].experts is None
    packed = pack(sequences, tokens_by_trajectory(sequences))
    assert packed.experts[:, 0, 1].tolist() == [1, 1, 1, 2, 2, *[255] * (2 + 7 + 7)]
    assert pack(sequences[1:], tokens_by_trajectory(sequences)).experts is None
    assert replayed(sequences) == {"routing/replayed": 5 / 21, "routing/bytes_per_token": 14 / 21}
    second.experts = np.full((5, 1, 2), 3, dtype=np.uint8)  # an update came: all was computed anew
    (again,) = to_sequences([Group(SAMPLE, [one])])
    assert again.experts[:, 0, 0].tolist() == [3, 3, 3, 3, 3, 255, 255]


def test_groups_number_trajectories_and_leave_failures_out():
    failed = trajectory(None, "the endpoint died")
    groups = [
        Group(SAMPLE, [trajectory(0.5), failed]),
        Group(SAMPLE, [failed]),
        Group(SAMPLE, [trajectory(segments=2)]),
    ]
    made = to_sequences(groups)
    assert [(s.trajectory, s.group) for s in made] == [(0, 0), (1, LEFT_OUT), (2, LEFT_OUT), (3, 2), (3, 2)]
    assert [s.policy_version for s in made][-2:] == [3, 4]
    assert math.isnan(made[1].reward)
    assert [s.trajectory for s in trainable(made)] == [0, 3, 3]


def test_a_trajectory_nobody_scored_is_an_error_in_a_group_and_none_without():
    with pytest.raises(DataError, match="sample s, sibling 0 has not been scored"):
        to_sequences([Group(SAMPLE, [trajectory(None)])])
    (made,) = to_sequences([trajectory(None)])
    assert made.group == LEFT_OUT and math.isnan(made.reward)


def test_segments_without_policy_tokens_are_passed_over():
    silent = Ledger()
    silent.append([1], Origin.PROMPT, 0)
    made = trajectory()
    made.segments.append(silent)
    assert len(to_sequences([made])) == 1


def test_arrays_are_written_over_the_policys_tokens(draw):
    made = draw("ppaata")
    made.write("values", [1, 2, 3])
    assert made.policy.tolist() == [2, 3, 5] and made.values.tolist() == [0, 0, 1, 2, 0, 3]
    assert made.gather("values").tolist() == [1, 2, 3]


def test_misaligned_arrays_are_refused(draw):
    made = draw("ppaata")
    with pytest.raises(ValueError, match=r"\(2,\) values for 3 policy tokens"):
        made.write("values", [1.0, 2.0])
    with pytest.raises(ValueError, match="'logprobs' is not an array that is written later"):
        made.write("logprobs", [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="trajectory 0 has no returns"):
        made.gather("returns")
    with pytest.raises(ValueError, match="differ in length"):
        replace(made, logprobs=np.zeros(1))
    made.advantages = np.zeros(1)
    for read in (made.check, lambda: made.gather("advantages")):
        with pytest.raises(ValueError, match="advantages of trajectory 0 has 1 entries for 6 tokens"):
            read()


def test_what_training_computed_is_written_into_the_trajectories():
    groups = [Group(SAMPLE, [trajectory(1.0, segments=2), trajectory(None, "the endpoint died")])]
    played = groups[0].trajectories
    made = to_sequences(groups)
    for sequence, value in zip(made, (1.0, 0.5, 0.0), strict=True):
        sequence.advantages = np.where(sequence.loss_mask, value, 1e6)
    write_back(made, played)
    assert [one.advantage for one in played] == [0.75, 0.0], "the mean over policy tokens of all segments"
    data = [ledger.training for one in played for ledger in one.segments]
    for one, sequence in zip(data[:2], made[:2], strict=True):
        assert one is not None and np.array_equal(one.advantages, sequence.advantages) and one.values is None
    assert data[2] is None
