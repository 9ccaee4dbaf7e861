"""A text endpoint as the model's side: no ledger, the same turns, tools, users and budgets."""

import asyncio

import pytest

from turnwise.chat.formats import hermes
from turnwise.config import Config
from turnwise.engines.samplers.endpoint import EndpointReply
from turnwise.errors import EpisodeError
from turnwise.rollout.endpoint_backend import EndpointBackend
from turnwise.rollout.episode import RolloutContext, run_episode
from turnwise.rollout.routing import Plan
from turnwise.rollout.toolbox.toolbox import Toolbox
from turnwise.rollout.tools.calculate import calculate
from turnwise.rollout.users.loading import Users
from turnwise.types import CallStatus, FinishReason, Role, StopReason


class ScriptedEndpoint:
    """Answers with given replies, and keeps what it was asked."""

    def __init__(self, replies):
        self.replies = list(replies)
        self.asked = []

    async def complete(self, messages, tools, **options):
        self.asked.append((messages, tools, options))
        reply = self.replies[len(self.asked) - 1]
        if isinstance(reply, Exception):
            raise reply
        return reply


def said(text="", calls=(), finish=FinishReason.STOP, prompt=0, completion=0, reasoning=None):
    return EndpointReply(text, list(calls), finish, prompt, completion, "model", reasoning)


def play(sample, replies, **rollout):
    config = Config()
    for key, value in rollout.items():
        setattr(config.rollout, key, value)
    endpoint = ScriptedEndpoint(replies)
    toolbox, users = Toolbox([calculate], config.rollout), Users(config)
    context = RolloutContext(
        config,
        Plan([sample], config, toolbox, users),
        toolbox,
        users,
        lambda conversation, noise, tools: EndpointBackend(endpoint, config.sampling, tools, noise, hermes),
    )
    return asyncio.run(run_episode(sample, sibling=0, step=0, context=context)), endpoint


def test_the_servers_own_tool_calls_are_run_and_sent_back(sample):
    replies = [said("", [("id1", "calculate", '{"expression": "6*7"}')]), said("#### 42")]
    trajectory, endpoint = play(sample(), replies)
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert [turn.message.text for turn in trajectory.turns] == ["", "#### 42"]
    assert trajectory.calls[0].status is CallStatus.OK
    assert trajectory.segments == [] and trajectory.render_check is None
    sent = endpoint.asked[1][0]
    assert sent[2]["tool_calls"][0]["function"] == {"name": "calculate", "arguments": '{"expression": "6*7"}'}
    assert sent[3] == {"role": "tool", "content": "42", "tool_call_id": "id1"}
    assert endpoint.asked[0][1] == [calculate.schema]


def test_calls_left_in_the_text_are_run_too_and_spelled_once(sample, call):
    trajectory, endpoint = play(sample(), [said(call("calculate", expression="6*7")), said("#### 42")])
    assert trajectory.calls[0].status is CallStatus.OK
    assert "tool_calls" not in endpoint.asked[1][0][2]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [("{", CallStatus.MALFORMED), ("[]", CallStatus.MALFORMED), ("", CallStatus.BAD_ARGUMENTS)],
)
def test_calls_that_cannot_be_read_are_answered(sample, arguments, status):
    trajectory, endpoint = play(sample(), [said("", [("i", "calculate", arguments)]), said("#### 1")])
    assert [record.status for record in trajectory.calls] == [status]
    assert endpoint.asked[1][0][3]["content"].startswith("Error: ")


def test_reasoning_that_the_server_took_out_is_kept(sample):
    trajectory, _ = play(sample(), [said("#### 42", reasoning="six sevens")])
    assert trajectory.answers[0].reasoning == "six sevens"
    assert trajectory.answers[0].visible == "#### 42"
    trajectory, _ = play(sample(), [said("<think>a</think>#### 42")])
    assert trajectory.answers[0].reasoning == "a"


def test_the_token_budget_counts_replies_from_the_next_prompt(sample):
    replies = [
        said("", [("i", "calculate", '{"expression": "1"}')], prompt=100, completion=10),
        said("", [("j", "calculate", '{"expression": "2"}')], prompt=150, completion=10),
        said("#### 1", prompt=200, completion=5),
    ]
    trajectory, endpoint = play(sample(), replies, max_tokens=60)
    assert trajectory.stop_reason is StopReason.TOKEN_BUDGET
    assert len(trajectory.turns) == 2
    trajectory, endpoint = play(sample(), replies, max_tokens=111)
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert [options["max_tokens"] for _, _, options in endpoint.asked] == [111, 101, 51]
    assert len({options["seed"] for _, _, options in endpoint.asked}) == 3


def test_a_server_that_counts_no_prompt_counts_completions(sample):
    replies = [said("", [("i", "calculate", '{"expression": "1"}')], completion=10), said("x", completion=10)]
    _, endpoint = play(sample(), replies, max_tokens=30)
    assert [options["max_tokens"] for _, _, options in endpoint.asked] == [30, 20]


def test_a_cut_answer_ends_the_episode_and_the_user_sees_it(sample):
    trajectory, _ = play(sample(), [said("#### 4", finish=FinishReason.LENGTH)], interaction="gsm8k")
    assert trajectory.stop_reason is StopReason.TURN_TRUNCATED
    assert trajectory.turns[0].user_score == 0.0


def test_an_endpoint_that_fails_fails_its_episode(sample):
    trajectory, _ = play(sample(), [EpisodeError("503 three times")])
    assert (trajectory.stop_reason, trajectory.failure) == (StopReason.FAILED, "503 three times")


def test_siblings_are_asked_with_seeds_of_their_own(sample):
    seeds = set()
    config = Config()
    toolbox, users = Toolbox([], config.rollout), Users(config)
    endpoint = ScriptedEndpoint([said("a")] * 8)
    context = RolloutContext(
        config,
        Plan([sample()], config, toolbox, users),
        toolbox,
        users,
        lambda conversation, noise, tools: EndpointBackend(endpoint, config.sampling, tools, noise, hermes),
    )
    for sibling in range(8):
        trajectory = asyncio.run(run_episode(sample(), sibling=sibling, step=0, context=context))
        assert trajectory.messages[-1].role is Role.ASSISTANT
        seeds.add(endpoint.asked[-1][2]["seed"])
    assert len(seeds) == 8
