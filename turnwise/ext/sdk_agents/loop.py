"""The agent `openai_client`: it is made for a run, of the agent that `sdk_agents.client` names."""

import inspect

from turnwise.config import Config
from turnwise.config.sections import section
from turnwise.errors import ConfigError, PluginError
from turnwise.ext.sdk_agents.config import SdkAgentsConfig
from turnwise.rollout.loops.loading import Loop
from turnwise.system.plugins import load

RESULT = "client_result"
"""The artifact that has what the agent returned."""


class OpenAIClient:
    """Plays with the agent that `sdk_agents.client` names."""

    def for_run(self, config: Config) -> Loop:
        """The loop of the configured agent; an error for one that cannot be run."""
        options = section(config, SdkAgentsConfig)
        spec = options.client
        for name in config.rollout.agent_options:
            problem = f"unknown option {name!r}: it takes none"
            raise ConfigError(f"rollout.agent_options: agent loop openai_client: {problem}")
        if spec is None:
            raise ConfigError(
                "the agent openai_client runs your own: set sdk_agents.client to module:function or to exec:COMMAND"
            )
        try:
            from turnwise.ext.sdk_agents import command_agent
            from turnwise.ext.sdk_agents.client_loop import ClientLoop
        except ModuleNotFoundError as error:
            raise ConfigError(f"sdk_agents.client needs {error.name}: pip install 'turnwise[sdk_agents]'") from error
        if spec.startswith(command_agent.PREFIX):
            return ClientLoop(command_agent.command_agent(spec, options.client_env), spec)
        client = load(spec, "client")
        if not callable(client) or isinstance(client, type):
            raise PluginError(f"client {spec!r} must be a function, not {type(client).__name__}")
        try:
            inspect.signature(client).bind("", None)
        except TypeError as error:
            raise PluginError(f"client {spec!r} must take a base URL and a sample: {error}") from error
        return ClientLoop(client, spec)


openai_client = OpenAIClient()
