"""What an agent raises: an episode that counts when it is the policy's doing, a failure when it is the machinery's."""

import asyncio
import contextlib
import json
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from sdk_clients import ADD, ask, async_anthropic, async_openai, sync_openai

from turnwise import configure, train
from turnwise.config import ScoringConfig
from turnwise.errors import EpisodeError
from turnwise.reports.alerts import Alerts
from turnwise.reports.evaluation import agent_errors
from turnwise.scoring.scorer import apply, is_failed
from turnwise.scoring.service import Scoring
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.types import StopReason


class ModelBehaviorError(Exception):
    """As an SDK raises it when the model names a tool that is not there."""


def raised(make):
    """An agent that asks once and then raises what `make` gives, or lets pass what it raises."""

    async def run(base_url, sample):
        async with async_openai(base_url) as client:
            answer = await client.chat.completions.create(model="m", messages=ask(), tools=[ADD])
            made = make(answer.choices[0].message.content)
            raise await made if asyncio.iscoroutine(made) else made

    return run


def chained(cause, error):
    try:
        raise error from cause
    except Exception as raised_one:
        return raised_one


def while_handling(cause, error):
    try:
        try:
            raise cause
        except Exception:
            raise error  # noqa: B904 (that it is not said is the point)
    except Exception as raised_one:
        return raised_one


REQUEST = httpx.Request("POST", "http://elsewhere/v1")
POLICYS = {
    "unknown tool": lambda words: ModelBehaviorError("Tool nowhere not found in agent"),
    "no json": lambda words: json.loads(words),
    "missing argument": lambda words: KeyError("city"),
    "in a group": lambda words: ExceptionGroup("two", [ValueError("no number"), TypeError("none")]),
    "cut answer": lambda words: openai.LengthFinishReasonError(
        completion=openai.types.chat.ChatCompletion(id="a", choices=[], created=0, model="m", object="chat.completion")
    ),
}
MACHINERYS = {
    "refused connection": lambda words: ConnectionRefusedError("elsewhere"),
    "wrapped": lambda words: chained(OSError("no route"), ModelBehaviorError("the model did not answer")),
    "while handling": lambda words: while_handling(TimeoutError(), ValueError("gave up")),
    "in a group": lambda words: ExceptionGroup("two", [ValueError("no number"), OSError("no route")]),
    "import": lambda words: ModuleNotFoundError("No module named 'pandas'"),
    "httpx": lambda words: httpx.ReadTimeout("late", request=REQUEST),
    "another service": lambda words: httpx.HTTPStatusError("503", request=REQUEST, response=httpx.Response(503)),
    "openai": lambda words: openai.APIConnectionError(request=REQUEST),
    "anthropic": lambda words: anthropic.APITimeoutError(request=REQUEST),
    "a package nobody knows": lambda words: type("ServiceUnavailable", (Exception,), {})("come again"),
    "said by the agent": lambda words: EpisodeError("the shop is closed today"),
}


@pytest.mark.parametrize("kind", POLICYS)
def test_what_the_policy_brought_about_is_an_episode_that_counts(rollouts, agent, kind):
    found = rollouts.make(["I would rather not."], client=agent(raised(POLICYS[kind]))).play()
    assert found.stop_reason is StopReason.AGENT_ERROR and found.failure is None and not is_failed(found)
    assert found.facts.agent_error and len(found.turns) == 1
    assert "1 of 1 episodes" in agent_errors([found])


@pytest.mark.parametrize("kind", MACHINERYS)
def test_what_the_machinery_brought_about_is_a_failure(rollouts, agent, kind):
    found = rollouts.make(["I would rather not."], client=agent(raised(MACHINERYS[kind]))).play()
    assert found.stop_reason is StopReason.FAILED and "client turnwise_test_agent:run: " in found.failure
    assert agent_errors([found]) is None


def test_a_request_that_was_refused_is_a_failure_whatever_the_agent_makes_of_it(rollouts, agent):
    async def run(base_url, sample):
        async with async_anthropic(base_url) as client:
            first = await client.messages.create(model="m", max_tokens=9, messages=ask())
            with contextlib.suppress(anthropic.BadRequestError):
                await client.messages.create(model="m", max_tokens=9, messages=ask(), extra_body={"mystery": 1})
            raise ValueError(f"nothing after {first.content[0].text}")

    found = rollouts.make(["ok"], client=agent(run)).play()
    assert found.stop_reason is StopReason.FAILED and "nothing after ok" in found.failure


def test_a_blocking_agent_is_read_the_same(rollouts, agent):
    def run(base_url, sample):
        with sync_openai(base_url) as client:
            client.chat.completions.create(model="m", messages=ask())
        raise KeyError("lost")

    found = rollouts.make(["ok"], client=agent(run)).play()
    assert found.stop_reason is StopReason.AGENT_ERROR and found.facts.agent_error == "KeyError: 'lost'"


@pytest.mark.parametrize(("value", "reward", "parts"), [(0.0, 0.0, 0.0), (-0.5, -0.5, 0.0), (None, 1.0, 1.0)])
def test_its_reward_is_the_configs_or_the_scorers(rollouts, agent, value, reward, parts):
    async def generous(trajectory):
        return {"kind": 1.0}

    found = rollouts.make(["ok"], client=agent(raised(POLICYS["unknown tool"]))).play()
    scorer = Scoring.of(ScoringConfig(agent_error=value), ["test"], generous).scorers["test"]
    asyncio.run(apply(scorer, found))
    assert found.reward == reward and found.parts == {"kind": parts} and found.failure is None


AGENT = """
from openai import AsyncOpenAI
async def agent(base_url, sample):
    async with AsyncOpenAI(base_url=base_url, api_key="-", max_retries=0) as client:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "6*7?"}])
    raise ValueError("Tool 'nowhere' not found in agent")
"""


def test_a_training_goes_on_and_says_so(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "lost_agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    config = configure(
        "run=a", f"runs_dir={tmp_path}", "sdk_agents.client=lost_agent.py:agent", "engine.threads=1", "training.steps=1",
        "training.groups=2", "training.group_size=2", "training.max_lag=0", "training.minibatches=1",
        "training.eval_every=0", "training.save_every=0", "tracking.to=[]", "eval.samples=2", "rollout.tools=[]",
    )  # fmt: skip
    train(config)
    (path,) = (tmp_path / "a" / "trajectories").glob("step_*.parquet")
    found = list(read_trajectories(path))
    assert [one.stop_reason for one in found] == [StopReason.AGENT_ERROR] * 4
    assert [one.reward for one in found] == [0.0] * 4 and all(one.advantage is not None for one in found)
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    (line,) = [one for one in lines if "trajectories/failed" in one]
    assert line["stop_reasons/agent_error"] == 4 and line["trajectories/failed"] == 0
    alerts = Alerts(config, tmp_path)
    assert "4 of 4 episodes" in alerts.after_step({}, found)[0]
    assert not any("4 of 4 episodes" in text for text in alerts.after_step({}, found))
