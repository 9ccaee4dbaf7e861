"""What a run asks of a cluster, in numbers: how many actors of each kind, and what each reserves."""

from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.config import Config
from turnwise.engines.devices import look
from turnwise.errors import ConfigError


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
    every = [
        *([learner] if training else []),
        Asked("samplers", cluster.samplers, cluster.sampler_cpus, cluster.sampler_gpus),
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
