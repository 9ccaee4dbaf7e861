"""What `cluster=ray` means around the engines: what is refused, who scores, and where sandboxes are."""

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec

from turnwise.choices import ScoringRun
from turnwise.cluster.asked import ELSEWHERE, SERVICES, Placing, asked_of, check_gpus_here
from turnwise.cluster.connection import Say, check_address, hearing, joined, on_ray
from turnwise.cluster.sandboxes import ClusterPool
from turnwise.cluster.scorers import ClusterRunner
from turnwise.config import Config
from turnwise.engines.server_gpus import check_reserved
from turnwise.errors import ConfigError
from turnwise.sandbox.opening import pools_elsewhere
from turnwise.scoring.service import Runner, make_runner


def check_cluster(config: Config) -> None:
    """ConfigError for what a cluster cannot do, before anything is started."""
    if not on_ray(config):
        return
    if find_spec("ray") is None:
        raise ConfigError("cluster=ray needs Ray: pip install 'turnwise[cluster]'")
    check_address(config.cluster.address)
    check_gpus_here(config, training=False)
    check_reserved(config)
    if config.engine.servers:  # every sampler would load weights under the turns of the others
        raise ConfigError(
            "engine.servers: samplers of a cluster start their own; set one of engine.servers and cluster"
        )
    if config.cluster.samplers > 1 and not samples_there(config):
        raise ConfigError(
            f"cluster.samplers={config.cluster.samplers}: engine={config.engine.name} is not on the cluster"
        )
    if config.cluster.scorers and config.scoring.run is ScoringRun.http:
        raise ConfigError("cluster.scorers: with scoring.run=http a server scores already; set one of the two")
    if config.cluster.sandboxes and config.sandbox.url is not None:
        raise ConfigError("cluster.sandboxes: with sandbox.url a server runs the code already; set one of the two")


def samples_there(config: Config) -> bool:
    """Whether the configured engine runs on the cluster; an endpoint and a script do not."""
    return on_ray(config) and config.engine.name not in ELSEWHERE


def runner_of(config: Config) -> Runner:
    """The runner of scorers: on the cluster where it has any, else here."""
    if on_ray(config) and config.cluster.scorers:
        return ClusterRunner(config.cluster, config.scoring)
    return make_runner(config.scoring)


async def placing(config: Config, *, training: bool) -> Placing | None:
    """Which node would hold what, and what lacks; None without a cluster."""
    if not on_ray(config):
        return None
    connection = await joined(config.cluster, config.learner.processes)
    return connection.placing(asked_of(config, training=training))


async def no_services(config: Config) -> str | None:
    """Why nothing can be scored or run on the cluster now, in words; None where it can."""
    if not on_ray(config):
        return None
    every = [kind for kind in asked_of(config, training=False) if kind.kind in SERVICES]
    connection = await joined(config.cluster, config.learner.processes)
    placed = connection.placing([replace(kind, count=1) for kind in every])
    return placed.short or placed.busy


@asynccontextmanager
async def services(config: Config, say: Say) -> AsyncIterator[None]:
    """While tools and scorers run: sandboxes are the cluster's where it has any, and its news are said."""
    if not on_ray(config):
        yield
        return
    there: AbstractContextManager[None] = nullcontext()
    if config.cluster.sandboxes:
        there = pools_elsewhere(lambda sandbox, output: ClusterPool(config.cluster, sandbox, output))
    with there:
        async with hearing(config.cluster, say, config.learner.processes, config.learner.hang_seconds):
            yield
