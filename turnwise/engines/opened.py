"""What opening engines gives, and what all who open one need: where the model is, and reading it."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from turnwise.chat.renderer import Renderer
from turnwise.choices import Precision
from turnwise.config import Config
from turnwise.engines.devices import Chosen
from turnwise.engines.learners.learner import Learner
from turnwise.engines.memory_plan import MemoryPlan
from turnwise.engines.model.sources import ModelSource, find_model
from turnwise.engines.samplers.sampler import Sampler
from turnwise.errors import EngineError

if TYPE_CHECKING:
    import torch

    from turnwise.engines.device_clock import DeviceClock
    from turnwise.engines.model.attention import Regime
    from turnwise.engines.model.policy_model import PolicyModel

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class OpenSampler:
    """A sampler that runs; whoever opened it closes it."""

    sampler: Sampler
    threads: int
    """CPU threads that are best here, for a learner beside it too."""
    regime: "Regime | None" = None
    """The arithmetic in which a learner finds its log-probs again to the last bit; None where none is proven."""


@dataclass(frozen=True, slots=True)
class LearnerParts:
    """What a learner has to have beside the policy, and how many updates it will make in all."""

    updates: int
    critic: bool = False
    reference: bool = False


class OpenLearner(Learner, Protocol):
    """A learner that runs."""

    @property
    def device(self) -> "torch.device":
        """Where this process has to look for what it computes."""
        ...


@dataclass(frozen=True, slots=True)
class OpenEngines:
    """The sampler and the learner of a training."""

    sampler: Sampler
    learner: "OpenLearner"
    exact: bool
    """Whether their log-probs are the same to the last bit: proven, or by kernels that both share."""
    threads: int
    take_turns: bool
    """Whether the sampler gives its memory back while the learner learns."""
    clock: "DeviceClock | None" = None
    """Of the GPU that the sampler writes on."""
    metrics: Callable[[], dict[str, float]] | None = None
    """What each step's line says of where they run."""
    place: Path | None = None
    """Where files of weights are put for the sampler, where it takes files."""


@dataclass(frozen=True, slots=True)
class Together:
    """What sampler and learner of a training are opened with."""

    config: Config
    chosen: Chosen
    memory: MemoryPlan | None
    renderer: Renderer
    parts: LearnerParts
    say: Say
    keep: Callable[[Sampler], None]
    """Is told of the sampler, which will be closed from then on."""


def model_source(config: Config) -> ModelSource:
    """Where the configured model is; a hub id is fetched."""
    return find_model(config.model.path, config.model.trust_remote_code)


def read_policy(config: Config, precision: Precision) -> "PolicyModel":
    """The configured model, in this number format."""
    from turnwise.engines.model.loading import choose_implementation, read_model

    source = model_source(config)
    return read_model(source, choose_implementation(source, config.model.implementation), dtype_of(precision))


def dtype_of(precision: Precision) -> "torch.dtype":
    """As torch calls it."""
    import torch

    found: torch.dtype = getattr(torch, precision.value)
    return found


def check_sight(model: "PolicyModel", renderer: Renderer, say: Say) -> None:
    """Look at a small picture before anyone shows one: what makes something of its own of it reads text only."""
    if not model.sees:
        return
    if renderer.images is None:
        model.sees = False
        return
    try:
        model.look([renderer.images.prepare(small_picture())])
    except EngineError as error:
        model.sees, renderer.blind = False, str(error)
        say(f"the model reads text only: {error}")


def small_picture() -> bytes:
    """Noise, which no two parts of an image have in common."""
    import numpy as np
    from PIL import Image

    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()
