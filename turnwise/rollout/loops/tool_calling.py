"""The loop of tools and users: answer, call tools, read their results, be asked again."""

from turnwise.rollout.conversation import Conversation


async def tool_calling(chat: Conversation) -> None:
    """Answer, or call tools and read their results; the interaction may ask for more."""
    while True:
        message = await chat.generate()
        replies = await chat.call_tools(message) if message.tool_calls else await chat.ask_user()
        if not replies:
            return
        chat.add(replies)
