"""The section `ray`: how many of each kind of process a cluster runs, and what each reserves."""

from dataclasses import dataclass
from typing import ClassVar

from turnwise.config.knobs import at_least, duration, knob, more_than, only, reaches, was
from turnwise.config.marks import may_change

RAY = ("cluster", "ray")


@dataclass
class RayConfig:
    """Where samplers, learner, scorers and sandboxes run (docs/ext/ray.md)."""

    EVERY_KNOB: ClassVar = (may_change(),)

    address: str | None = knob(None, only(*RAY), reaches("network"), was("cluster.address"))
    """HOST:PORT of a running Ray cluster, or `auto` for the one this machine belongs to; null starts one on this
    machine that ends with the run. Set it on a cluster."""
    samplers: int = knob(1, at_least(1, 4096), only(*RAY), was("cluster.samplers"))
    """Copies of the engine. Those for which there is no room yet start when a node joins. Raise it when steps wait for
    episodes."""
    scorers: int = knob(0, at_least(0, 4096), only(*RAY), was("cluster.scorers"))
    """Processes on other nodes that score; each scores as `scoring.run` says. 0 scores beside the training loop. Set it
    when scoring keeps the loop's machine busy."""
    sandboxes: int = knob(0, at_least(0, 4096), only(*RAY), was("cluster.sandboxes"))
    """Nodes that run the code a model writes, one pool of sandboxes each. 0 runs it beside the training loop. Set it
    when tools keep the loop's machine busy, or it must run no foreign code."""
    sampler_cpus: float = knob(1.0, at_least(0, 4096), only(*RAY), was("cluster.sampler_cpus"))
    """CPUs that each sampler reserves. Raise it to have no more of them on a node than it has cores for."""
    sampler_gpus: float = knob(0.0, at_least(0, 64), only(*RAY), was("cluster.sampler_gpus"))
    """GPUs that each sampler reserves and sees; with 0 it sees none. Set it to 1 for engine=cuda."""
    learner_cpus: float = knob(1.0, more_than(0, 4096), only(*RAY), was("cluster.learner_cpus"))
    """CPUs that the learner reserves, or each of learner.processes. Raise it to the number of cores that one computes
    on."""
    learner_gpus: float = knob(0.0, at_least(0, 64), only(*RAY), was("cluster.learner_gpus"))
    """GPUs that the learner, or each of learner.processes, reserves and sees; with 0 it sees none. Set it to 1 to train
    on GPUs."""
    service_cpus: float = knob(1.0, at_least(0, 4096), only(*RAY), was("cluster.service_cpus"))
    """CPUs that each scorer, each node of sandboxes and each of rollout.workers reserves. Raise it when they run many
    processes of their own."""
    wait_seconds: float = knob(300.0, duration(), only(*RAY), was("cluster.wait_seconds"))
    """Seconds until the cluster has room for the learner and one of each other kind. Raise it where nodes are started
    only when they are needed, and take their time."""
