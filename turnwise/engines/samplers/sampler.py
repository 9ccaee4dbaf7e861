"""What a sampler is: tokens and media in, tokens out, with log-probs, a finish reason and each token's version."""

import enum
from dataclasses import dataclass
from typing import Protocol

from turnwise.engines.samplers.request import Request
from turnwise.engines.updates import Update
from turnwise.types import Completion


class Logprobs(enum.StrEnum):
    """Which log-probs come with a completion."""

    SCALED = "scaled"
    """Of the temperature-scaled distribution before top-k and top-p: what a learner recomputes."""
    FILTERED = "filtered"
    """Of what was left after top-k and top-p."""
    NONE = "none"
    """Every one is nan."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a sampler can do; the plan prints it."""

    logprobs: Logprobs
    updates: frozenset[type]
    """The kinds of Update that `publish` takes."""
    media: bool = False
    sleeps: bool = False
    """Whether `sleep` gives its memory back."""

    def __str__(self) -> str:
        taken = " and ".join(sorted(kind.__name__ for kind in self.updates)) or "no weights"
        reads, sleeps = "text and images" if self.media else "text only", "" if self.sleeps else "not "
        given = {Logprobs.SCALED: "log-probs as a learner recomputes them", Logprobs.NONE: "no log-probs"}
        shown = given.get(self.logprobs, "log-probs after top-k and top-p, which a learner does not recompute")
        return f"{shown}, takes {taken}, reads {reads}, does {sleeps}give memory back in its sleep"


class Sampler(Protocol):
    """Writes completions. One instance serves many conversations at once.

    Raises EngineLost when a server or node went away (the episode tries again) and EngineError when nothing helps.
    """

    context_length: int
    """The most tokens a sequence may have, prompt included."""
    capabilities: Capabilities

    async def generate(self, request: Request) -> Completion:
        """Continue the sequence. A full context gives FinishReason.LENGTH with fewer tokens."""
        ...

    async def release(self, conversation: str) -> None:
        """Forget what was kept for a conversation; unknown names are fine."""
        ...

    async def publish(self, update: Update, version: int) -> None:
        """Write with these weights from now on; returns when every later token is theirs."""
        ...

    async def sleep(self) -> None:
        """Lend memory to the learner: drop caches, and what else can be made again. Turns under way wait."""
        ...

    async def wake(self) -> None:
        """Go on."""
        ...

    async def close(self) -> None:
        """Free everything; pending requests fail."""
        ...
