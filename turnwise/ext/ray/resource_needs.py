"""What a run asks of a cluster, in numbers: how many actors of each kind, and what each reserves."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from turnwise import extensions
from turnwise.config import Config
from turnwise.config.sections import section
from turnwise.engines.devices import episode_workers, visible_gpus
from turnwise.errors import ConfigError
from turnwise.ext.ray.config import RayConfig
from turnwise.rollout.placement import Layout

SERVICES = ("scorers", "sandboxes")
"""What an episode needs beside its sampler."""


@dataclass(frozen=True, slots=True)
class Demand:
    """`Demand("learner", 2, 1, 1)`: two ranks with a CPU and a GPU each."""

    kind: str
    count: int
    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"{self.kind} {self.count} x ({self.cpus:g} CPUs, {self.gpus:g} GPUs)"


def demands(config: Config, *, training: bool) -> list[Demand]:
    """All kinds of actors of a run, in the order in which they are placed."""
    cluster = section(config, RayConfig)
    learner = Demand("learner", config.learner.processes, cluster.learner_cpus, cluster.learner_gpus)
    samplers = cluster.samplers if extensions.engine(config.engine.name).device else 0
    every = [
        *([learner] if training else []),
        Demand("samplers", samplers, cluster.sampler_cpus, cluster.sampler_gpus),
        Demand("scorers", cluster.scorers, cluster.service_cpus, 0.0),
        Demand("sandboxes", cluster.sandboxes, cluster.service_cpus, 0.0),
        Demand("workers", episode_workers(config), cluster.service_cpus, 0.0),
    ]
    return [demand for demand in every if demand.count]


def sums(every: Sequence[Demand]) -> tuple[float, float]:
    """CPUs and GPUs of all together."""
    return sum(demand.count * demand.cpus for demand in every), sum(demand.count * demand.gpus for demand in every)


def in_words(every: Sequence[Demand]) -> str:
    """With the sum: `learner 2 x (1 CPUs, 1 GPUs) + samplers 4 x (1 CPUs, 1 GPUs) = 6 CPUs, 6 GPUs`."""
    cpus, gpus = sums(every)
    return f"{' + '.join(map(str, every))} = {cpus:g} CPUs, {gpus:g} GPUs"


@dataclass(slots=True)
class Room:
    """What is left of a node, and who is there: `Room("10.0.0.1 (a1b2)", 8, 1)`."""

    node: str
    cpus: float
    gpus: float
    held: dict[str, int] = field(default_factory=dict)

    def fits(self, demand: Demand) -> bool:
        """Whether there is room for one more."""
        return demand.cpus <= self.cpus and demand.gpus <= self.gpus

    def take(self, demand: Demand) -> None:
        """Counts one more actor of this kind on the node, and what it reserves."""
        self.cpus, self.gpus = self.cpus - demand.cpus, self.gpus - demand.gpus
        self.held[demand.kind] = self.held.get(demand.kind, 0) + 1

    def fill(self, demand: Demand) -> int:
        """How many more there is room for."""
        limits = [left // each for left, each in ((self.cpus, demand.cpus), (self.gpus, demand.gpus)) if each]
        return int(min(limits)) if limits else demand.count


def lay_out(rooms: Sequence[Room], every: Sequence[Demand]) -> Layout:
    """What each node would hold if it were free: ranks are packed, all others spread."""
    lacking: list[str] = []
    there = sum(room.cpus for room in rooms), sum(room.gpus for room in rooms)
    for demand in every:
        for number in range(demand.count):
            free = [room for room in rooms if room.fits(demand)]
            if not free:
                lacking.append(f"{demand.count - number} of {demand.count} {demand.kind}")
                break
            if demand.kind == "learner":
                chosen = max(free, key=lambda room: (demand.kind in room.held, room.fill(demand)))
            else:
                chosen = min(free, key=lambda room: sum(room.held.values()))
            chosen.take(demand)
    lines = [f"{room.node}: {', '.join(f'{kind} {n}' for kind, n in room.held.items()) or 'nothing'}" for room in rooms]
    if not lacking:
        return Layout(lines, None)
    return Layout(
        lines,
        f"{', '.join(lacking)}; the run asks for {in_words(every)}, and the cluster has {len(rooms)} node(s), "
        f"{there[0]:g} CPUs, {there[1]:g} GPUs",
    )


def check_gpus_here(config: Config, *, training: bool) -> None:
    """A cluster that is started on this machine never gets another GPU: who would wait for one waits for ever."""
    every = [demand for demand in demands(config, training=training) if demand.gpus]
    if section(config, RayConfig).address is not None or not every:
        return
    gpus, there = sums(every)[1], len(visible_gpus().gpus)
    if gpus > there:
        raise ConfigError(
            f"ray.address=null starts Ray on this machine, which has {there} GPUs, and the run asks for {gpus:g}: "
            f"{in_words(every)}"
        )
