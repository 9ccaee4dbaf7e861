"""The loop of an environment over HTTP, which gives the first messages and the tools and answers every message."""

from collections.abc import Awaitable, Callable

from turnwise.config import RolloutConfig
from turnwise.rollout.conversation import Conversation
from turnwise.rollout.environments import play
from turnwise.rollout.http_environment import EnvironmentClient, HttpEnvironment, HttpEnvOptions

TAKES_OPTIONS = True
"""Of `rollout.agent_options`."""


def loop_of(config: RolloutConfig) -> Callable[[Conversation], Awaitable[None]]:
    """Plays the sample `extra_info.name` and `index` of the server `rollout.agent_options.url`."""
    options = HttpEnvOptions.of(config.agent_options)

    async def http_env(chat: Conversation) -> None:
        await play(chat, HttpEnvironment(EnvironmentClient.shared(options), chat.sample))

    return http_env
