"""What crosses to a worker and back: conversations by what is new in them, and nouns that are the same afterwards."""

import pickle

import numpy as np
import pytest

from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.ledger import Ledger, Media, MediaSpan, Origin, TokenTrainingData
from turnwise.rollout.workers.conversations import Heard, Told
from turnwise.rollout.workers.packing import packed
from turnwise.types import (
    Completion,
    FinishReason,
    Message,
    Role,
    Sample,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
    VersionRun,
)

IMAGE = Media("0" * 32, b"png", np.array([7, 7]), np.array([True, True]), {"pixel_values": np.zeros((2, 3))})


def request(ids: list[int], *images: int, conversation: str = "a") -> Request:
    spans = tuple(MediaSpan(IMAGE, start) for start in images)
    return Request(conversation, np.array(ids), SamplingParams(8), NoiseKey(0, 1, "s", 2), spans)


def test_the_other_side_has_the_whole_conversation_and_is_told_what_is_new():
    told, heard = Told(), Heard()
    asked = [
        request([1, 7, 7], 1), request([5], conversation="b"), request([1, 7, 7, 2, 7, 7], 1, 4),
        request([1, 7, 7, 2, 7, 7], 1, 4), request([3, 4]), request([3, 4, 5]),
    ]  # fmt: skip
    crossed = []
    for number, each in enumerate(asked):
        ask = pickle.loads(packed(told.ask(number, each)))
        crossed.append((ask.known, ask.token_ids.tolist(), len(ask.media)))
        again = heard.request(ask)
        assert (again.conversation, again.params, again.noise) == (each.conversation, each.params, each.noise)
        assert again.token_ids.tolist() == each.token_ids.tolist() and again.token_ids.dtype == np.int64
        assert [span.start for span in again.media] == [span.start for span in each.media]
    assert crossed == [(0, [1, 7, 7], 1), (0, [5], 0), (3, [2, 7, 7], 1), (6, [], 0), (0, [3, 4], 0), (2, [5], 0)]
    told.forget("b")
    assert told.ask(9, request([5], conversation="b")).known == 0


def test_an_episode_is_the_same_on_the_other_side():
    ledger = Ledger()
    ledger.append([1, 7, 7], Origin.PROMPT, 0)
    ledger.append([9], Origin.POLICY, 0, [-0.5], 3)
    ledger.training = TokenTrainingData(advantages=np.array([0.0, 0.0, 0.0, 1.0], np.float32))
    ledger.place_at([MediaSpan(IMAGE, 1)])
    said = Message(Role.ASSISTANT, "so", (ToolCall("c", "look", {"at": [1]}),), answer="so")
    sample = Sample("s", (Message(Role.USER, "?"),), "arithmetic", info={"row": 1})
    turn = Turn(0, said, FinishReason.STOP, 3, 3, 1)
    whole = Trajectory(sample, 0, 1, [*sample.prompt, said], [turn], [ledger], StopReason.ANSWERED, 0.5)
    again = pickle.loads(packed(whole))
    assert again == whole and again.messages[-1] is again.turns[0].message
    again.segments[0].append([8], Origin.TEMPLATE, 0)
    assert again.segments[0].token_ids.tolist() == [1, 7, 7, 9, 8]
    assert again.segments[0].media[0].media.arrays["pixel_values"].shape == (2, 3)
    with pytest.raises(ValueError, match="read-only"):
        again.segments[0].token_ids[0] = 5


def test_the_experts_of_a_turn_cross_with_it():
    experts = np.arange(12, dtype=np.uint16).reshape(3, 2, 2)
    run = (VersionRun(0, 1),)
    done = Completion(np.array([4]), np.array([-1.0], np.float32), FinishReason.STOP, run, experts)
    turn = Turn(0, Message(Role.ASSISTANT, "y"), FinishReason.STOP, 0, 3, 1, experts=experts)
    for there in pickle.loads(packed([done, turn])):
        assert there.experts.dtype == np.uint16 and np.array_equal(there.experts, experts)
