"""A user who doubts: after an answer, asks for Python code that verifies it."""

from typing import Annotated

from pydantic import Field

from turnwise.rollout.users.user import Reply, UserTurn

FEEDBACK = "Are you sure? Can you write Python code to verify?"
TERMINATE = "Thank you."
READS = ()
"""Of a row's interaction_kwargs."""
PLAIN_OPTIONS = ("feedback_message", "max_turns", "terminate_message")
"""Options that name no code, file or address: a run that somebody sent may set them."""


async def code_verify(
    turn: UserTurn,
    *,
    feedback_message: str = FEEDBACK,
    max_turns: Annotated[int, Field(ge=0)] = 1,
    terminate_message: str = TERMINATE,
) -> Reply:
    """Says `feedback_message` after each of the first `max_turns` answers, then ends with `terminate_message`."""
    if turn.number > max_turns:
        return Reply(terminate_message, end=True)
    return Reply(feedback_message, note={"asked": turn.number})
