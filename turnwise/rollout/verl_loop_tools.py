"""The tools of an episode as verl's agent loops are given them: with verl's methods, run and recorded by us."""

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from turnwise.rollout.verl_tools import agent_data_of_loop
from turnwise.types import Message, Role, ToolCall

if TYPE_CHECKING:
    from turnwise.rollout.conversation import Conversation


class LoopSchema(dict[str, Any]):
    """A JSON schema that can also be read as the attributes of verl's classes, and dumped."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self:
            raise AttributeError(f"the tool's schema has no {name!r}")
        found = self[name]
        return LoopSchema(found) if isinstance(found, dict) else found

    def model_dump(self, **how: Any) -> dict[str, Any]:
        """The schema as it was given."""
        return dict(self)


@dataclass(slots=True)
class LoopTool:
    """One tool: `execute` calls it as the agent loops of ours do, with its time limit, its lifecycle and a record."""

    chat: "Conversation"
    tool_schema: LoopSchema
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def name(self) -> str:
        found: str = self.tool_schema["function"]["name"]
        return found

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, Any]:
        """Nothing: the tool's own lifecycle is kept behind `execute`, which passes the row's arguments."""
        return instance_id or f"{self.name}{next(self._numbers)}", _response(None)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, Any, Any]:
        """(response, reward, metrics)."""
        turn = self.chat.turns[-1]
        call = ToolCall(f"t{turn.index % 1000:03d}c{next(self._numbers) % 10000:04d}", self.name, parameters)
        with agent_data_of_loop(kwargs.get("agent_data")):
            (reply,) = await self.chat.call_tools(Message(Role.ASSISTANT, "", (call,)))
        record = next(one for one in turn.calls if one.call is call)
        return _response(reply.text), record.score, dict(record.info)

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Nothing: the tool itself is asked when the episode ends."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Nothing: see `create`."""


def loop_tools(chat: "Conversation") -> list[LoopTool]:
    """Those that the model is shown."""
    numbers = itertools.count()
    return [LoopTool(chat, LoopSchema(schema), numbers) for schema in chat.tools]


def _response(text: str | None) -> Any:
    """As verl's ToolResponse has it; images were put into words."""
    return SimpleNamespace(text=text, image=None, video=None)
