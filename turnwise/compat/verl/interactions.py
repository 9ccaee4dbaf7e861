"""Stand-ins for verl.interactions, which verl deleted in 0.8: the base class, the registry and the two examples."""

from pathlib import Path
from typing import Any

from turnwise.plugins import load
from turnwise.rollout.interaction_sessions import read_registry
from turnwise.rollout.interactions.base import BaseInteraction
from turnwise.rollout.interactions.gsm8k import Gsm8kInteraction

__all__ = [
    "BaseInteraction", "Gsm8kInteraction", "WeatherInteraction", "get_interaction_class",
    "initialize_interactions_from_config",
]  # fmt: skip


class WeatherInteraction(BaseInteraction):
    """Content when any tool was used; always ends the conversation."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        if any(message["role"] == "tool" for message in messages):
            return True, "Thank you for your weather query!", 1.0, {}
        return True, "Please use the weather tool to get the weather information.", 0.0, {}


def get_interaction_class(cls_name: str) -> Any:
    """The class of a dotted name."""
    return load(cls_name, "interaction")


def initialize_interactions_from_config(interaction_config_file: str | Path) -> dict[str, Any]:
    """Interactions by name, made. A run needs none of this: rollout.interactions_file takes the file itself."""
    makers = read_registry(Path(interaction_config_file))
    return {name: make({}) for name, make in makers.items()}
