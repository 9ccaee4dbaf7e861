"""The loop of a Gymnasium environment: each answer is an action, each reply an observation in words."""

from turnwise.rollout.conversation import Conversation
from turnwise.rollout.environments import play
from turnwise.rollout.gym_environment import GymEnvironment, GymOptions


async def gym_env(chat: Conversation) -> None:
    """Play one episode of `rollout.agent_options.env`."""
    await play(chat, GymEnvironment(GymOptions.of(chat.options), chat.sample, chat.seed))
