"""A user who doubts: after an answer, asks for Python code that verifies it."""

from typing import Any, ClassVar

from turnwise.errors import ConfigError
from turnwise.rollout.interactions.base import BaseInteraction, check_options

FEEDBACK = "Are you sure? Can you write Python code to verify?"
TERMINATE = "Thank you."


class CodeVerifyInteraction(BaseInteraction):
    """Says `feedback_message` after each of the first `max_turns` answers, then ends with `terminate_message`."""

    reads_kwargs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        check_options("code_verify", config, {"feedback_message": str, "max_turns": int, "terminate_message": str})
        self.feedback_message: str = config.get("feedback_message", FEEDBACK)
        self.terminate_message: str = config.get("terminate_message", TERMINATE)
        self.max_turns: int = config.get("max_turns", 1)
        if self.max_turns < 0:
            raise ConfigError(f"interaction 'code_verify': max_turns must be 0 or more, not {self.max_turns}")
        self._asked: dict[str, int] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        name = await super().start_interaction(instance_id)
        self._asked[name] = 0
        return name

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        if self._asked[instance_id] >= self.max_turns:
            return True, self.terminate_message, None, {}
        self._asked[instance_id] += 1
        return False, self.feedback_message, None, {"asked": self._asked[instance_id]}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        del self._asked[instance_id]


INTERACTION = CodeVerifyInteraction
