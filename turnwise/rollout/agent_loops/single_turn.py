"""The loop of one answer."""

from turnwise.rollout.conversation import Conversation


async def single_turn(chat: Conversation) -> None:
    """Answer once."""
    await chat.generate()
