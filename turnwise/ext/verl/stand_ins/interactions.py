"""Stand-ins for verl.interactions, which verl deleted in 0.8: the base class, the registry and the two examples."""

from pathlib import Path
from typing import Any

from turnwise.errors import EpisodeError
from turnwise.ext.verl.users import BaseInteraction, read_registry
from turnwise.rollout.users.gsm8k import RIGHT, WRONG
from turnwise.scoring.rules.gsm8k import extract_strict
from turnwise.system.plugins import load

__all__ = [
    "BaseInteraction", "Gsm8kInteraction", "WeatherInteraction", "get_interaction_class",
    "initialize_interactions_from_config",
]  # fmt: skip


class Gsm8kInteraction(BaseInteraction):
    """Says whether the last answer is the right one, and never which that is."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._truth: dict[str, str] = {}
        self._score: dict[str, float] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        if kwargs.get("ground_truth") is None:
            raise EpisodeError("interaction 'gsm8k' needs interaction_kwargs.ground_truth")
        name = await super().start_interaction(instance_id)
        self._truth[name], self._score[name] = str(kwargs["ground_truth"]), 0.0
        return name

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        answer = next((str(m["content"]) for m in reversed(messages) if m["role"] == "assistant"), "")
        is_right = extract_strict(answer) == self._truth[instance_id]
        self._score[instance_id] = float(is_right)
        return is_right, RIGHT if is_right else WRONG, float(is_right), {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        return self._score[instance_id]

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        for values in (self._truth, self._score):
            values.pop(instance_id, None)  # none when it could not start


class WeatherInteraction(BaseInteraction):
    """Content when any tool was used; always ends the conversation."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        if any(message["role"] == "tool" for message in messages):
            return True, "Thank you for your weather query!", 1.0, {}
        return True, "Please use the weather tool to get the weather information.", 0.0, {}


def get_interaction_class(cls_name: str) -> Any:
    """The interaction class that a dotted name stands for."""
    return load(cls_name, "interaction")


def initialize_interactions_from_config(interaction_config_file: str | Path) -> dict[str, Any]:
    """Interactions by name, made. A run needs none of this: verl.interactions_file takes the file itself."""
    makers = read_registry(Path(interaction_config_file))
    return {name: make({}).interaction for name, make in makers.items()}
