"""The loop of one answer."""

from turnwise.rollout.conversation import Conversation


async def single_turn(chat: Conversation) -> None:
    """Lets the policy answer once."""
    await chat.generate()
