"""The loop of an environment over HTTP, which gives the first messages and the tools and answers every message."""

from turnwise.config import Config
from turnwise.ext.http_env.environment import EnvironmentClient, HttpEnvironment, HttpEnvOptions
from turnwise.rollout.conversation import Conversation
from turnwise.rollout.environments import play
from turnwise.rollout.loops.loading import Loop


class HttpEnvLoop:
    """Plays the sample `extra_info.name` and `index` of the server `rollout.agent_options.url`."""

    def for_run(self, config: Config) -> Loop:
        """The loop of the configured server."""
        options = HttpEnvOptions.of(config.rollout.agent_options)

        async def play_http(chat: Conversation) -> None:
            await play(chat, HttpEnvironment(EnvironmentClient.shared(options), chat.sample))

        return play_http


http_env = HttpEnvLoop()
