"""The section `sdk_agents`: the agent that is written against an SDK."""

from dataclasses import dataclass

from turnwise.config.knobs import knob, only, path, reaches, was


@dataclass
class SdkAgentsConfig:
    """Which agent plays, and what it gets of the run's environment (docs/ext/sdk_agents.md)."""

    client: str | None = knob(None, path(), reaches("code"), was("rollout.client"))
    """Your agent written against an SDK, module:function or a program, `exec:python agent.py`; its calls come to us. A
    function gets a base URL and the sample. It plays rows that name no agent. Set it to train the agent you have."""
    client_env: list[str] = knob([], only("sdk_agents.client", "*"), reaches("environment"), was("rollout.client_env"))
    """Variables that a program (`exec:`) gets beside PATH, HOME, LANG and the like. Set what your agent needs, such as
    [SEARCH_KEY, HTTPS_PROXY]; nothing else of the run's environment reaches it."""
