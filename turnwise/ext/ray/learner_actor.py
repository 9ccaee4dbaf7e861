"""The actor that hosts the learner: one call at a time, arrays in and out, files sent where no disk is shared."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.config import Config
from turnwise.engines.devices import gpus_for_learner, rank_devices
from turnwise.engines.learners.hosting import LearnerReply
from turnwise.engines.learners.learner import Objective, TokenBatch, Who
from turnwise.engines.memory_plan import Training, memory_here
from turnwise.engines.open_in_process import open_learner
from turnwise.engines.opener import LearnerParts
from turnwise.engines.rendering import make_renderer
from turnwise.errors import EngineError
from turnwise.ext.fsdp.opening import open_over_ranks
from turnwise.ext.ray.config import RayConfig
from turnwise.ext.ray.connection import SearchPath
from turnwise.ext.ray.messages import own_arrays
from turnwise.ext.ray.numeric_fingerprint import machine_words
from turnwise.ext.ray.ranks import ActorRanks
from turnwise.ext.ray.sampler_actor import node_name
from turnwise.ext.ray.weight_store import WeightsPlan, pack
from turnwise.system.folders import OwnFolder

if TYPE_CHECKING:
    from turnwise.engines.learners.local import LocalLearner
    from turnwise.ext.fsdp.learner import ShardedLearner

CHUNK_BYTES = 32 * 2**20
"""Of a file that is sent."""
FOLDERS = "turnwise-learner-"


class StaleWeights(EngineError):
    """Weights were asked for that an update has changed since."""


@dataclass(frozen=True, slots=True)
class LearnerOrders:
    """What a learner is opened with."""

    path: SearchPath
    config: Config
    parts: LearnerParts
    regime: Any
    """The sampler's, where its machine is like ours."""
    threads: int
    machine: str
    """The sampler's."""
    precision: str
    """Of the weights that samplers compute with."""
    cluster: RayConfig
    group: Any
    """The placement group of its ranks, where it has several."""


@dataclass(frozen=True, slots=True)
class LearnerFacts:
    """What a learner says of itself once it is open."""

    plan: WeightsPlan
    device: str
    exact: bool
    """Whether it finds the sampler's log-probs again to the last bit."""
    node: str
    machine: str


class LearnerActor:
    """The other side of `learner.ActorLearner`. Made an actor by `Connection.actor`."""

    def __init__(self, orders: LearnerOrders) -> None:
        orders.path.enter()
        self._orders = orders
        self._notes: list[str] = []
        self._received: OwnFolder | None = None
        self._ranks: ActorRanks | None = None
        self._opened: LocalLearner | ShardedLearner | None = None
        self._plan: WeightsPlan

    def beat(self) -> None:
        """A sign of life, by a thread of its own."""

    def open(self) -> LearnerReply:
        """Load the model; once, before anything else."""
        where, exact = node_name(), False
        if self._orders.config.learner.processes > 1:
            self._opened, self._ranks = self._open_ranks()
            where, device = self._ranks.nodes(), self._ranks.device
        else:
            self._opened, exact = self._open_here()
            device = str(self._opened.device)
        self._plan = WeightsPlan.of(self._learner.weights().shapes, self._orders.precision)
        return self._reply(LearnerFacts(self._plan, device, exact, where, machine_words()))

    @property
    def _learner(self) -> "LocalLearner | ShardedLearner":
        if self._opened is None:
            raise EngineError("the learner is not open")
        return self._opened

    def _open_here(self) -> "tuple[LocalLearner, bool]":
        """A learner in this process, and whether it finds the sampler's log-probs again to the last bit."""
        import torch

        orders = self._orders
        config, parts = orders.config, orders.parts
        alike = orders.regime is not None and machine_words() == orders.machine
        torch.set_num_threads(orders.threads)
        memory = memory_here(config, Training(parts.critic, parts.reference), samples=False)
        regime, renderer = orders.regime if alike else None, make_renderer(config)
        local = open_learner(config, renderer, parts, regime=regime, memory=memory, say=self._notes.append)
        exact = alike and local.device.type == "cpu" and not local.forward.narrow and orders.precision == "float32"
        return local, exact

    def _open_ranks(self) -> "tuple[ShardedLearner, ActorRanks]":
        """A learner over ranks in actors of their own; this process computes nothing and holds no weight."""
        orders = self._orders
        config, there = orders.config, replace(orders.config, cluster="ray")
        devices = rank_devices(there, gpus_for_learner(there), samples=False)
        ranks = ActorRanks(orders.group, devices, orders.cluster, config.learner.hang_seconds)
        return open_over_ranks(config, make_renderer(config), orders.parts, ranks, self._notes.append), ranks

    def score(self, batch: TokenBatch, who: Who) -> LearnerReply:
        return self._reply(self._learner.score(own_arrays(batch), who))

    def update(self, batches: Sequence[TokenBatch], objective: Objective) -> LearnerReply:
        return self._reply(self._learner.update([own_arrays(batch) for batch in batches], objective))

    def weights(self, step: int) -> Iterator[Any]:
        """The parts of the plan, one object each or a reference to one that a rank has put, and then their step."""
        if self._learner.step != step:
            raise StaleWeights(f"the learner has made {self._learner.step} updates, not {step}")
        if self._ranks is None:
            yield from pack(self._plan, self._learner.weights().tensors)
        else:
            yield from self._ranks.parts(self._plan)
        yield step

    def sees(self, file: str) -> bool:
        """Whether a file of the caller's is on a disk that is shared; ranks on several nodes must all see it."""
        return Path(file).is_file() if self._ranks is None else self._ranks.sees(file)

    def save(self, folder: str, *, policy: bool) -> LearnerReply:
        """Write into a folder that is shared."""
        self._save(Path(folder), policy=policy)
        return self._reply(None)

    def load(self, folder: str) -> LearnerReply:
        """Read from a folder that is shared, or from what was sent."""
        self._learner.load(Path(folder))
        return self._reply(None)

    def saved(self, *, policy: bool) -> Iterator[tuple[str, bytes]]:
        """What `save` writes, in pieces: (name of the file, what is added to it)."""
        own = OwnFolder(FOLDERS)
        try:
            folder = _files(own)
            self._save(folder, policy=policy)
            for path in sorted(entry for entry in folder.rglob("*") if entry.is_file()):
                with path.open("rb") as file:
                    while piece := file.read(CHUNK_BYTES):
                        yield path.relative_to(folder).as_posix(), piece
        finally:
            own.remove()

    def receive(self, name: str, piece: bytes) -> None:
        """A piece of a file for `load_received`."""
        if self._received is None:
            self._received = OwnFolder(FOLDERS)
        path = _files(self._received) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(piece)

    def load_received(self) -> LearnerReply:
        """Go on from what was received."""
        if self._received is None:
            raise EngineError("no file was sent")
        try:
            return self.load(str(_files(self._received)))
        finally:
            self._received.remove()
            self._received = None

    def _save(self, folder: Path, *, policy: bool) -> None:
        if policy:
            self._learner.save_policy(folder)
        else:
            self._learner.save(folder)
            self._learner.saved()

    def _reply(self, value: Any) -> LearnerReply:
        notes = tuple(self._notes)
        self._notes.clear()
        return LearnerReply(value, self._learner.step, self._learner.token_budget, notes)


def _files(own: OwnFolder) -> Path:
    """What travels; the folder's lock stands beside it."""
    folder = own.path / "files"
    folder.mkdir(exist_ok=True)
    return folder
