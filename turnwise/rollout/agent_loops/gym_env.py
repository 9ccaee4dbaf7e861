"""The loop of a Gymnasium environment: each answer is an action, each reply an observation in words."""

from collections.abc import Awaitable, Callable

from turnwise.config import RolloutConfig
from turnwise.rollout.conversation import Conversation
from turnwise.rollout.environments import play
from turnwise.rollout.gym_environment import GymEnvironment, GymOptions

TAKES_OPTIONS = True
"""Of `rollout.agent_options`."""


def loop_of(config: RolloutConfig) -> Callable[[Conversation], Awaitable[None]]:
    """Plays one episode of `rollout.agent_options.env`."""
    options = GymOptions.of(config.agent_options)

    async def gym_env(chat: Conversation) -> None:
        await play(chat, GymEnvironment(options, chat.sample, chat.seed))

    return gym_env
