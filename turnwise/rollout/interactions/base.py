"""The interface of an interaction, the simulated user: verl's BaseInteraction, always finalised, every answer seen."""

from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import uuid4

from turnwise.errors import ConfigError, unknown
from turnwise.types import Message, Sample


@dataclass(frozen=True, slots=True)
class Seen:
    """What an interaction that asks for it (`sees_episode`) is given: the sample, and the messages so far as they are.

    The last message is the assistant's; the prompt comes first.
    """

    sample: Sample
    messages: tuple[Message, ...]
    answers: tuple[Message, ...]
    """Those of them that the policy wrote."""

    @property
    def answer(self) -> str:
        """What the assistant said last, without its reasoning and its tool calls."""
        return self.answers[-1].visible if self.answers else ""


class BaseInteraction:
    """A user who reads the assistant's answer and says something back.

    One instance serves all episodes of a run, so state belongs under `instance_id`. Subclasses implement
    `generate_response`; the rest is optional.
    """

    sees_episode: ClassVar[bool] = False
    """Set it to get `seen=Seen(...)` in `generate_response`: verl's messages are texts, without calls and reasoning
    told apart."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", type(self).__name__)

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin an episode; kwargs are the row's interaction_kwargs. Returns the id to use."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """(end the episode?, what the user says, score of the answer, anything to record)."""
        raise NotImplementedError(f"{type(self).__name__} must implement generate_response")

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        """A score of the whole episode, asked for once at its end; None is no opinion."""
        return None

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the episode; called on every path."""


def check_options(kind: str, config: dict[str, Any], valid: dict[str, type]) -> None:
    """Refuse options an interaction does not have, or of the wrong type."""
    for key, value in config.items():
        if key == "name":
            continue
        if key not in valid:
            raise ConfigError(unknown(f"option of interaction {kind!r}", key, valid))
        if not isinstance(value, valid[key]) or isinstance(value, bool) is not (valid[key] is bool):
            raise ConfigError(f"interaction {kind!r}: {key} must be {valid[key].__name__}, not {value!r}")


def last_assistant_text(messages: list[dict[str, Any]]) -> str:
    """The newest assistant message, or an empty string."""
    return next((str(m["content"]) for m in reversed(messages) if m["role"] == "assistant"), "")
