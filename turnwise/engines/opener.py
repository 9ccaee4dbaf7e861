"""How an engine of the table is opened, and what opening gives; where the configured model is, and reading it."""

import functools
import io
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from turnwise import extensions
from turnwise.config import Config, EngineConfig
from turnwise.config.choices import Precision
from turnwise.engines.learners.learner import Learner
from turnwise.engines.model.sources import ModelSource, find_model
from turnwise.engines.samplers.sampler import Sampler
from turnwise.errors import EngineError, PluginError
from turnwise.system.plugins import load, load_module

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from turnwise.chat.renderer import Renderer
    from turnwise.engines.device_clock import DeviceClock
    from turnwise.engines.devices import Gpu
    from turnwise.engines.model.attention import Regime
    from turnwise.engines.model.policy_model import PolicyModel
    from turnwise.engines.samplers.endpoint import ChatEndpoint

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
    """A learner whose model is loaded and that can be trained at once."""

    @property
    def device(self) -> "torch.device":
        """Where this process has to look for what it computes."""
        ...


@dataclass(frozen=True, slots=True)
class OpenPair:
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
    weights_folder: Path | None = None
    """Where files of weights are put for the sampler, where it takes files."""


class ShardedLearners(Protocol):
    """The learners that several processes share, of the module that the table names for `learner.processes`."""

    def open_alone(self, config: "Config", renderer: "Renderer", parts: "LearnerParts", say: "Say") -> "OpenLearner":
        """Without a sampler; it must be closed."""
        ...

    def open_beside(
        self, config: "Config", renderer: "Renderer", parts: "LearnerParts", say: "Say"
    ) -> "AbstractAsyncContextManager[OpenLearner]":
        """Beside a sampler of this process, which keeps its GPU."""
        ...

    def replicas(self, config: "Config") -> int:
        """Whole copies of the learner's state that its processes hold together; ConfigError where they cannot."""
        ...

    def how_shared(self, config: "Config") -> str:
        """What each of its processes has a part of, in words."""
        ...

    def read_whole(self, folder: Path) -> "tuple[dict[str, Tensor], dict[str, Any]]":
        """What its processes wrote into a checkpoint, put together."""
        ...


class Opener:
    """How one engine is opened, checked and described. A new sampler defines `open`; the rest has a default."""

    async def open(self, config: Config, renderer: "Renderer", say: Say) -> OpenSampler:
        """The sampler, running; `say` is told what was measured and decided."""
        raise EngineError(f"engine={config.engine.name} writes messages and no tokens: it has no sampler")

    def connect(self, engine: EngineConfig) -> "ChatEndpoint":
        """A client of the endpoint, which must be closed; of engines that do not render."""
        raise EngineError(f"engine={engine.name} is not an endpoint")

    async def check(self, config: Config) -> str | None:
        """What is found of the engine before a run, for the report; ConfigError or PluginError where it is missing."""
        return None

    def describe(self, config: Config) -> str:
        """The engine in the plan's words."""
        return f"{config.engine.name}, model {config.model.path}"

    def sequences(self, config: Config, gpus: "tuple[Gpu, ...]") -> int | None:
        """How many sequences an engine that computes by itself decodes together; None where nobody knows."""
        return None

    def check_beside_learner(self, config: Config) -> str | None:
        """ConfigError where engine and learner would take each other's GPUs; what is said where they share some."""
        return None

    def reserved_problem(self, config: Config, gpus: float, *, here: bool) -> str | None:
        """Why it is no good that a cluster reserves so many GPUs for a sampler; `here`: it is of this machine only."""
        return None

    def keeps_weights(self, config: Config) -> bool:
        """Whether what is published stays with servers that were there before the run and outlive it."""
        return False

    def weights_folder(self, config: Config) -> Path | None:
        """Where files of weights must lie for all who read them to see them; None: anywhere on this machine."""
        return None


def sharded_learners() -> ShardedLearners:
    """How a learner of several processes is opened, and how its state is read."""
    module: Any = load_module(extensions.named("learners")["sharded"], "learner")
    learners: ShardedLearners = module
    return learners


def opener_of(config: Config) -> Opener:
    """The opener of the configured engine."""
    return _opener(extensions.engine(config.engine.name).opener)


@functools.cache
def _opener(spec: str) -> Opener:
    kind = load(spec, "engine")
    if not isinstance(kind, type) or not issubclass(kind, Opener):
        raise PluginError(f"engine {spec!r} must be a class that extends turnwise.engines.opener.Opener")
    return kind()


def model_source(config: Config) -> ModelSource:
    """Where the configured model is; a hub id is fetched."""
    return find_model(config.model.path, config.model.trust_remote_code)


def read_policy(config: Config, precision: Precision) -> "PolicyModel":
    """The configured model, in this number format."""
    from turnwise.engines.model.loading import choose_implementation, read_model

    source = model_source(config)
    return read_model(source, choose_implementation(source, config.model.implementation), dtype_of(precision))


def vocabulary_of(source: ModelSource, words: int) -> int:
    """How many token ids a model has: as its config says, which may be more than its tokenizer has words for."""
    from turnwise.engines.model.huggingface_folder import read_raw_config

    raw = {} if source.gguf_file is not None else read_raw_config(source.folder)
    text = raw.get("text_config")
    size = raw.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    return max(size, words) if isinstance(size, int) else words


def dtype_of(precision: Precision) -> "torch.dtype":
    """The torch number format of a precision."""
    import torch

    dtype: torch.dtype = getattr(torch, precision.value)
    return dtype


def check_vision(model: "PolicyModel", renderer: "Renderer", say: Say) -> None:
    """Look at a small picture before anyone shows one: what makes something of its own of it reads text only."""
    if not model.reads_images:
        return
    if renderer.images is None:
        model.reads_images = False
        return
    try:
        model.encode_images([renderer.images.prepare(small_picture())])
    except EngineError as error:
        model.reads_images, renderer.text_only = False, str(error)
        say(f"the model reads text only: {error}")


def small_picture() -> bytes:
    """Noise, which no two parts of an image have in common."""
    import numpy as np
    from PIL import Image

    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()
