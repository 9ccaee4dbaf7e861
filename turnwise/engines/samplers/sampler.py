"""What a sampler is: tokens and media in, tokens out, with log-probs, a finish reason and each token's version."""

import enum
from dataclasses import dataclass
from typing import Protocol

from turnwise.engines.samplers.request import Request
from turnwise.engines.weight_updates import Adapter, FullWeights, Update, WeightsFolder
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
    routes: bool = False
    """Whether completions say which experts were chosen."""

    def __str__(self) -> str:
        logprobs = {
            Logprobs.SCALED: "log-probs as the learner computes them",
            Logprobs.NONE: "no log-probs",
        }.get(self.logprobs, "log-probs after top-k and top-p, which the learner does not compute")
        kinds = {FullWeights: "all weights", Adapter: "a LoRA adapter", WeightsFolder: "a folder of weights"}
        updates = sorted(kinds.get(kind, "stored weights") for kind in self.updates)
        weights = f"takes {' or '.join(updates)}" if updates else "takes no new weights"
        reads = "text and images" if self.media else "text only"
        sleep = "can free its memory between steps" if self.sleeps else "cannot free its memory between steps"
        return f"{logprobs}, {weights}, reads {reads}, {sleep}"


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
        """Takes back the memory that `sleep` gave up, and goes on."""
        ...

    async def close(self) -> None:
        """Free everything; pending requests fail."""
        ...
