"""The loop of tools that ends with the tool `finish`: the policy says itself when its work is done."""

from turnwise.rollout.conversation import Conversation
from turnwise.types import CallStatus

FINISH = "finish"


async def until_finish(chat: Conversation) -> None:
    """Call tools and read their results until `finish` was called, or nothing is called and nobody asks for more."""
    while True:
        message = await chat.generate()
        replies = await chat.call_tools(message) if message.tool_calls else await chat.ask_user()
        if not replies:
            return
        chat.add(replies)
        if any(record.call.name == FINISH and record.status is CallStatus.OK for record in chat.turns[-1].calls):
            return
