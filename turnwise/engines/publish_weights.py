"""From a learner's weights to what a sampler takes: a stream, an adapter's files or all weights in files."""

import asyncio
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.config import Config
from turnwise.engines.samplers.sampler import Capabilities, Logprobs, Sampler
from turnwise.engines.weight_updates import Adapter, FullWeights, Update, WeightsFolder
from turnwise.errors import ConfigError, EngineError
from turnwise.system.folders import OwnFolder, sweep

if TYPE_CHECKING:
    from torch import Tensor

    from turnwise.engines.learners.learner import Learner

MEMORY = Path("/dev/shm")
"""Files that are memory, where a machine has such."""
PART_BYTES = 2**30
"""Of a file of weights: so much is held at once while it is written."""
_PREFIX = "turnwise-weights-"


def check_trainable(name: str, capabilities: Capabilities, *, lora: bool) -> None:
    """Refuse a sampler whose tokens cannot be learned from, or that takes nothing of what will be published."""
    if capabilities.logprobs is Logprobs.NONE:
        raise ConfigError(f"training needs log-probs: engine={name} gives none")
    if not capabilities.updates & ({FullWeights, WeightsFolder, Adapter} if lora else {FullWeights, WeightsFolder}):
        kinds = ", ".join(sorted(kind.__name__ for kind in capabilities.updates)) or "nothing"
        raise ConfigError(
            f"training publishes {'' if lora else 'all '}weights after each step, but engine={name} takes: {kinds}"
        )


def check_replay(config: Config, *, routes: bool) -> None:
    """Refuse a learner that is to take the sampler's experts where nobody says which they are."""
    if config.learner.routing_replay and not routes:
        raise ConfigError(
            f"learner.routing_replay: engine={config.engine.name} does not say here which experts it chose; "
            "only our own sampler on the CPU does (engine=torch, without a cluster)"
        )


def needs_files(capabilities: Capabilities, *, lora: bool) -> bool:
    """Whether what a sampler is given are files."""
    return FullWeights not in capabilities.updates or (lora and Adapter in capabilities.updates)


def make_update(learner: "Learner", capabilities: Capabilities, folder: Path | None) -> Update:
    """The cheapest update that a sampler takes: an adapter alone, a stream, else files of all weights.

    Files are written into `folder`, which must outlive the update and everybody who may ask for it again.
    """
    kinds = capabilities.updates
    if folder is not None and Adapter in kinds and learner.save_adapter(folder):
        return Adapter(folder)
    if FullWeights in kinds:
        return learner.weights()
    if folder is not None and WeightsFolder in kinds and isinstance(weights := learner.weights(), FullWeights):
        write_weights(weights, folder)
        return WeightsFolder(folder)
    names = ", ".join(sorted(kind.__name__ for kind in kinds)) or "nothing"
    raise EngineError(f"the sampler takes {names}, which this learner cannot give")


def write_weights(weights: FullWeights, folder: Path) -> None:
    """Safetensors files under Hugging Face names, written as the stream goes."""
    from turnwise.engines.model.tensor_file import write_tensors

    part: dict[str, Tensor] = {}
    number = 0

    def flush() -> None:
        nonlocal number
        if part:
            number += 1
            write_tensors(folder / f"model-{number:05d}.safetensors", part, {"format": "pt"})
            part.clear()

    for name, tensor in weights.tensors:
        part[name] = tensor
        if sum(held.nbytes for held in part.values()) >= PART_BYTES:
            flush()
    flush()


async def publish(learner: "Learner", sampler: Sampler, version: int, parent: Path | None) -> None:
    """Let a sampler write with the learner's present weights. In the parent folder there are never more than two
    updates: the latest, which a replica that comes back asks for again, and the one before it until that is out of use.
    """
    folder = None if parent is None else parent / str(version)
    if folder is None:
        await sampler.publish(make_update(learner, sampler.capabilities, None), version)
        return
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    update = await asyncio.to_thread(make_update, learner, sampler.capabilities, folder)
    await sampler.publish(update, version)
    for before in parent.iterdir() if parent is not None else ():
        if before != folder and before.is_dir():
            await asyncio.to_thread(shutil.rmtree, before, ignore_errors=True)


@contextmanager
def weights_folder(needed: int, shared: Path | None) -> Iterator[Path]:
    """A folder for updates, gone with the block: in memory where two updates of `needed` bytes fit, else with other
    temporary files. `shared` is a folder that other machines see, where they must."""
    sweep(_PREFIX, MEMORY)  # before its room is looked at
    parent = shared or (MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 3 * needed else None)
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    # On a disk that machines share, locks of another one may not be seen: each looks after its own.
    folder = OwnFolder(_PREFIX if shared is None else f"{_PREFIX}{socket.gethostname()}-", parent)
    try:
        yield folder.path
    finally:
        folder.remove()
