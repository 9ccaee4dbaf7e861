"""A user who knows the answer and never tells it: says only whether the last answer is right."""

from typing import Any

from turnwise.errors import EpisodeError
from turnwise.rollout.interactions.base import BaseInteraction, check_options, last_assistant_text
from turnwise.scoring.gsm8k import extract_strict

RIGHT = "Your response is correct!"
WRONG = "Your response is incorrect! You need to reflect on your answer and try again."


class Gsm8kInteraction(BaseInteraction):
    """Ends the episode on a right answer, asks to try again on a wrong one. Both texts are fixed: nothing leaks."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        check_options("gsm8k", config, {})
        self._truth: dict[str, str] = {}
        self._score: dict[str, float] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        if kwargs.get("ground_truth") is None:
            raise EpisodeError("interaction 'gsm8k' needs interaction_kwargs.ground_truth")
        name = await super().start_interaction(instance_id)
        self._truth[name] = str(kwargs["ground_truth"])
        self._score[name] = 0.0
        return name

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        right = extract_strict(last_assistant_text(messages)) == self._truth[instance_id]
        self._score[instance_id] = float(right)
        return right, RIGHT if right else WRONG, float(right), {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        return self._score[instance_id]

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        del self._truth[instance_id], self._score[instance_id]


INTERACTION = Gsm8kInteraction
