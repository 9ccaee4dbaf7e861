"""`sdk_agents.client` before a run: what cannot be run is refused, what is not used is said, what is sent needs trust."""

from pathlib import Path

import pytest

from turnwise import configure
from turnwise.errors import ConfigError, PluginError
from turnwise.training.runs.trust import reaches


def no_sample(base_url):
    """Takes no sample."""


class Agent:
    """No function."""


def test_an_agent_that_cannot_be_called_is_refused_before_the_run(rollouts, agent, sample):
    with pytest.raises(PluginError, match="must take a base URL and a sample"):
        rollouts.make(["ok"], client=agent(no_sample))
    with pytest.raises(PluginError, match="must be a function, not type"):
        rollouts.make(["ok"], client=agent(Agent))
    with pytest.raises(PluginError, match="has no 'runs': did you mean 'run'"):
        rollouts.make(["ok"], client=agent(no_sample) + "s")
    with pytest.raises(ConfigError, match=r"set sdk_agents.client to module:function"):
        rollouts.make(["ok"], agent="openai_client")
    for command, text in (
        ("exec:", "has no command"),
        ("exec:a 'b", "is not a command"),
        ("exec:/no/such x", "/no/such"),
    ):
        with pytest.raises(ConfigError, match=text):
            rollouts.make(["ok"], client=command)


def test_what_is_not_used_is_said(rollouts, agent, sample):
    def run(base_url, sample):
        """Never called here."""

    def look(place: str) -> str:
        """Look there."""
        return place

    rollout = rollouts.make(
        ["ok"], tools=[look], client=agent(run), samples=[sample("a"), sample("b", agent="single_turn")]
    )
    assert any("1 samples of test are played by turnwise_test_agent:run" in one for one in rollout.context.plan.notices)
    idle = rollouts.make(["ok"], client=agent(run), agent="single_turn")
    assert any("no sample is played by sdk_agents.client" in one for one in idle.context.plan.notices)


def test_a_client_that_only_a_run_names_needs_trust(tmp_path: Path):
    config = configure("sdk_agents.client=agent.py:run")
    assert "sdk_agents.client=agent.py:run" in reaches(config, tmp_path)
    config = configure("sdk_agents.client='exec:sh -c ls'")
    assert "sdk_agents.client=exec:sh -c ls" in reaches(config, tmp_path)
