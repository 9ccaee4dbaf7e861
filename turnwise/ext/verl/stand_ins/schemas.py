"""Stand-in for verl.workers.rollout.schemas: the message of verl's requests."""

from typing import Any

from pydantic import BaseModel

from turnwise.ext.verl.stand_ins.tools import OpenAIFunctionToolCall, ToolResponse


class MessageOfRequest(BaseModel):
    """A message of a conversation, as verl's rollouts have it."""

    role: str
    content: str | dict[str, Any] | list[dict[str, Any]] | ToolResponse
    tool_calls: list[OpenAIFunctionToolCall] | None = None


Message = MessageOfRequest
"""Its name in verl."""
