"""The loop of an environment over HTTP, which gives the first messages and the tools and answers every message."""

from turnwise.rollout.conversation import Conversation
from turnwise.rollout.environments import play
from turnwise.rollout.http_environment import EnvironmentClient, HttpEnvironment, HttpEnvOptions

check_options = HttpEnvOptions.of


async def http_env(chat: Conversation) -> None:
    """Play the sample `extra_info.name` and `index` of the server `rollout.agent_options.url`."""
    client = EnvironmentClient.shared(HttpEnvOptions.of(chat.options))
    await play(chat, HttpEnvironment(client, chat.sample))
