"""What a run asks of a cluster, in numbers: how many actors of each kind, and what each reserves."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from turnwise.choices import EngineName
from turnwise.config import Config
from turnwise.engines.devices import look
from turnwise.errors import ConfigError

SERVICES = ("scorers", "sandboxes")
"""What an episode needs beside its sampler."""
ELSEWHERE = (EngineName.openai, EngineName.scripted)
"""Engines that are not on the cluster."""


@dataclass(frozen=True, slots=True)
class Asked:
    """`Asked("learner", 2, 1, 1)`: two ranks with a CPU and a GPU each."""

    kind: str
    count: int
    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"{self.kind} {self.count} x ({self.cpus:g} CPUs, {self.gpus:g} GPUs)"


def asked_of(config: Config, *, training: bool) -> list[Asked]:
    """All kinds of actors of a run, in the order in which they are placed."""
    cluster = config.cluster
    learner = Asked("learner", config.learner.processes, cluster.learner_cpus, cluster.learner_gpus)
    samplers = 0 if config.engine.name in ELSEWHERE else cluster.samplers
    every = [
        *([learner] if training else []),
        Asked("samplers", samplers, cluster.sampler_cpus, cluster.sampler_gpus),
        Asked("scorers", cluster.scorers, cluster.service_cpus, 0.0),
        Asked("sandboxes", cluster.sandboxes, cluster.service_cpus, 0.0),
    ]
    return [one for one in every if one.count]


def sums(every: Sequence[Asked]) -> tuple[float, float]:
    """CPUs and GPUs of all together."""
    return sum(one.count * one.cpus for one in every), sum(one.count * one.gpus for one in every)


def in_words(every: Sequence[Asked]) -> str:
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

    def fits(self, one: Asked) -> bool:
        """Whether there is room for one more."""
        return one.cpus <= self.cpus and one.gpus <= self.gpus

    def take(self, one: Asked) -> None:
        """One more is here."""
        self.cpus, self.gpus = self.cpus - one.cpus, self.gpus - one.gpus
        self.held[one.kind] = self.held.get(one.kind, 0) + 1

    def fill(self, one: Asked) -> int:
        """How many more there is room for."""
        limits = [left // each for left, each in ((self.cpus, one.cpus), (self.gpus, one.gpus)) if each]
        return int(min(limits)) if limits else one.count


@dataclass(frozen=True, slots=True)
class Placing:
    """Who would be where, and for whom there is no room."""

    nodes: list[str]
    """A line for each node."""
    short: str | None
    """What lacks, in one line: who has no place, the run's sum, and the cluster's."""
    busy: str | None = None
    """The same of what others have left free at the moment."""


def who_is_where(rooms: Sequence[Room], every: Sequence[Asked]) -> Placing:
    """What each node would hold if it were free: ranks are packed, all others spread."""
    lacking: list[str] = []
    there = sum(room.cpus for room in rooms), sum(room.gpus for room in rooms)
    for one in every:
        for number in range(one.count):
            free = [room for room in rooms if room.fits(one)]
            if not free:
                lacking.append(f"{one.count - number} of {one.count} {one.kind}")
                break
            if one.kind == "learner":
                chosen = max(free, key=lambda room: (one.kind in room.held, room.fill(one)))
            else:
                chosen = min(free, key=lambda room: sum(room.held.values()))
            chosen.take(one)
    lines = [f"{room.node}: {', '.join(f'{kind} {n}' for kind, n in room.held.items()) or 'nothing'}" for room in rooms]
    if not lacking:
        return Placing(lines, None)
    return Placing(
        lines,
        f"{', '.join(lacking)}; the run asks for {in_words(every)}, and the cluster has {len(rooms)} node(s), "
        f"{there[0]:g} CPUs, {there[1]:g} GPUs",
    )


def check_gpus_here(config: Config, *, training: bool) -> None:
    """A cluster that is started on this machine never gets another GPU: who would wait for one waits for ever."""
    every = [one for one in asked_of(config, training=training) if one.gpus]
    if config.cluster.address is not None or not every:
        return
    gpus, there = sums(every)[1], len(look().gpus)
    if gpus > there:
        raise ConfigError(
            f"cluster.address=null starts Ray on this machine, which has {there} GPUs, and the run asks for {gpus:g}: "
            f"{in_words(every)}"
        )
