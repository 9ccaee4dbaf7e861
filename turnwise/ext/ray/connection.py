"""The connection to a Ray cluster: one for an event loop, joined or started when first needed, left with the loop."""

import asyncio
import contextlib
import importlib
import logging
import os
import secrets
import socket
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from turnwise.config import ONE_MACHINE, Config
from turnwise.errors import ConfigError, EngineLost, TurnwiseError, one_line
from turnwise.ext.ray.calls import calling
from turnwise.ext.ray.config import RayConfig
from turnwise.ext.ray.ray_log import RayLog
from turnwise.ext.ray.resource_needs import Demand, Room, in_words, lay_out, sums
from turnwise.ext.ray.watchdog import SILENT_SECONDS, WATCH, Watchdog
from turnwise.rollout.placement import Layout
from turnwise.storage.run_dir import run_folder

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_DEDUP_LOGS": "0"}
"""No statistics to Ray's makers, no packing up of this environment, and no line of an actor left out."""
TOKEN_ENV, MODE_ENV = "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"
"""By which Ray's processes know each other, and whether they ask."""
REACH_SECONDS = 10.0
LOOPBACK_ENV = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Where it is 0, a cluster is of one machine, and its processes listen on 127.0.0.1 alone, as they do on macOS."""

Say = Callable[[str], None]
T = TypeVar("T")


def load_ray() -> Any:
    """The package `ray`; ConfigError where it is not installed."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(f"cluster=ray needs Ray: pip install 'turnwise[ray]' ({one_line(error)})") from error


@dataclass(frozen=True, slots=True)
class SearchPath:
    """Where this process looks for modules and files; an actor looks there too, as far as its node has them."""

    path: tuple[str, ...]
    folder: str

    @classmethod
    def here(cls) -> "SearchPath":
        return cls(tuple(sys.path), os.getcwd())

    def enter(self) -> None:
        """To be called first in an actor. Ray hides GPUs from who reserves some others, not from who reserves none."""
        if not load_ray().get_runtime_context().get_accelerator_ids().get("GPU"):
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        sys.path[:] = [*self.path, *(entry for entry in sys.path if entry not in self.path)]
        with contextlib.suppress(OSError):  # a node without it has files of its own
            os.chdir(self.folder)


@dataclass(eq=False, slots=True)
class Connection:
    """A joined cluster. Actors made through it end with it."""

    config: RayConfig
    ray: Any
    lost: dict[str, int] = field(default_factory=dict)
    """How often an actor of a kind went away, so far."""
    listeners: list[Say] = field(default_factory=list)
    services: dict[str, Any] = field(default_factory=dict)
    """Sets of actors that several parts of a run share, by what they do."""
    hang_seconds: float = SILENT_SECONDS
    """After so long without a sign of life an actor is lost that opens: to read a model keeps its threads waiting."""
    log: RayLog = field(default_factory=RayLog)
    watchdog: Watchdog = field(init=False)

    def __post_init__(self) -> None:
        self.watchdog = Watchdog(self.ray)

    @property
    def silent_seconds(self) -> float:
        """The same of one that works, but the learner's own."""
        return min(SILENT_SECONDS, self.hang_seconds)

    def say(self, text: str) -> None:
        """Passes a text to every listener."""
        for listener in self.listeners:
            listener(text)

    def actor(self, kind: type, *, cpus: float, gpus: float, concurrency: int = 1, **options: Any) -> Any:
        """A new actor of a class with a method `beat`, made with the caller's arguments: `connection.actor(Scorer,
        cpus=1, gpus=0)(...)`.

        Ray does not restart it: whoever uses it knows what it must be told first, and makes another one.
        """
        actor_class = self.ray.remote(concurrency_groups={WATCH: 1})(kind).options(
            num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_concurrency=concurrency, **options
        )
        return actor_class.remote

    def count_loss(self, kind: str) -> None:
        """An actor of this kind went away."""
        self.lost[kind] = self.lost.get(kind, 0) + 1

    def kill(self, actor: Any) -> None:
        """End an actor, whatever it does."""
        self.watchdog.leave(actor)
        with contextlib.suppress(self.ray.exceptions.RayError, ValueError):  # of a cluster that is gone
            self.ray.kill(actor)

    def calling(self, who: str) -> contextlib.AbstractContextManager[None]:
        """Around a call to an actor; see `calls.calling`."""
        return calling(self.ray, who)

    async def first(
        self, starting: Iterable["asyncio.Task[T]"], placed: Callable[[], bool], what: str, demands: str = ""
    ) -> T:
        """What the first of these gives; ConfigError when none was `placed` on a node in `ray.wait_seconds`.

        One whose node went away meanwhile counts only when no other is left.
        """
        waiting = set(starting)
        limit: float | None = self.config.wait_seconds
        while True:
            done, waiting = await asyncio.wait(waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not done and not placed():
                raise self.no_room(what, demands)
            limit = None
            good = [task for task in done if not isinstance(task.exception(), EngineLost)]
            if good or (done and not waiting):
                return (good or list(done))[0].result()

    async def patiently(self, call: Awaitable[T], words: Callable[[], str]) -> T:
        """What a call to an actor gives. Nothing is lost by waiting, but who does not come must be known by name."""
        pending = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({pending}, timeout=self.config.wait_seconds))[0]:
                self.say(words())
            return await pending
        finally:
            pending.cancel()

    def no_room(self, what: str, demands: str = "") -> ConfigError:
        """For something that was not placed in time; `demands` is what the whole run asks for."""
        all_of_it = f"the run asks for {demands}, and " if demands else ""
        return ConfigError(
            f"no node had room for {what} within ray.wait_seconds={self.config.wait_seconds:g}: {all_of_it}the "
            f"cluster has {self.room()}, not all of them free"
        )

    def room(self) -> str:
        """What the nodes have, in words."""
        return room_of(self.ray)

    def rooms(self) -> list[Room]:
        """Every node, as if nobody else were there."""
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        return [
            Room(
                f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})",
                node["Resources"].get("CPU", 0.0),
                node["Resources"].get("GPU", 0.0),
            )
            for node in nodes
        ]

    def layout(self, every: Sequence[Demand]) -> Layout:
        """Who would be where, as the cluster is now; nothing is placed."""
        layout, free = lay_out(self.rooms(), every), self.ray.available_resources()
        cpus, gpus = sums(every)
        left = free.get("CPU", 0.0), free.get("GPU", 0.0)
        if cpus <= left[0] and gpus <= left[1]:
            return layout
        return replace(
            layout, busy=f"the run asks for {in_words(every)}, and free are {left[0]:g} CPUs, {left[1]:g} GPUs"
        )

    def lacks(self, cpus: float, gpus: float) -> bool:
        """Whether all nodes together have less than this."""
        there = self.ray.cluster_resources()
        return bool(cpus > there.get("CPU", 0.0) or gpus > there.get("GPU", 0.0))

    def describe(self) -> str:
        """The cluster, for a run's log."""
        what = "joined" if self.config.address else f"started here, on {self.ray.util.get_node_ip_address()}"
        return f"Ray {self.ray.__version__}, {what}: {self.room()}{self.log.keep_in(run_folder())}"


def room_of(ray: Any) -> str:
    """What the nodes of a cluster have, in words."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus, gpus = (sum(node.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU"))
    return f"{len(nodes)} node(s), {cpus:g} CPUs, {gpus:g} GPUs"


_CONNECTIONS: (
    "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Connection, asyncio.Task[None], asyncio.Future[None]]]"
)
_CONNECTIONS = weakref.WeakKeyDictionary()


async def joined(config: RayConfig, cpus: float = 0.0) -> Connection:
    """The connection of the running event loop; Ray is joined or started by the first who asks, with as many CPUs as
    the run asks for where it is started.

    A task leaves it again when the loop ends, as it does on every path of a command: no process of Ray's that was
    started here outlives it.
    """
    loop = asyncio.get_running_loop()
    entry = _CONNECTIONS.get(loop)
    if entry is not None and not entry[1].done():
        if entry[0].config.address != config.address:
            raise ConfigError(f"this program has joined {entry[0].config.address}, not {config.address}")
        await asyncio.shield(entry[2])  # somebody else may still be joining
        return entry[0]
    ray = load_ray()
    if ray.is_initialized():
        raise ConfigError("this program is connected to a Ray cluster already; leave that with ray.shutdown() first")
    connection = Connection(config, ray)
    opened: asyncio.Future[None] = loop.create_future()
    keeper = loop.create_task(_keep(connection, opened, cpus))
    _CONNECTIONS[loop] = connection, keeper, opened
    await asyncio.shield(opened)
    return connection


@contextlib.asynccontextmanager
async def cluster_connection(
    config: RayConfig, say: Say, cpus: float = 0.0, hang_seconds: float = SILENT_SECONDS
) -> AsyncIterator[Connection]:
    """The connection, and what happens there is said while the block runs."""
    connection = await joined(config, cpus)
    connection.hang_seconds = hang_seconds
    say(connection.describe())
    connection.listeners.append(say)
    try:
        yield connection
    finally:
        connection.listeners.remove(say)


async def _keep(connection: Connection, opened: "asyncio.Future[None]", cpus: float) -> None:
    """Join, then wait to be cancelled with the loop, then leave."""
    with connection.log, _on_loopback(connection.config):
        joining = asyncio.ensure_future(asyncio.to_thread(_init, connection.ray, connection.config, cpus))
        try:
            await asyncio.shield(joining)
            opened.set_result(None)
            await asyncio.Event().wait()
        except BaseException as error:  # whoever waits for it gets it
            if opened.done() or isinstance(error, asyncio.CancelledError):
                raise
            opened.set_exception(error)
        finally:
            with contextlib.suppress(TurnwiseError):
                await joining  # what is being started can be ended only when it stands
            await asyncio.to_thread(connection.watchdog.stop)
            await asyncio.to_thread(connection.ray.shutdown)


def check_address(address: str | None) -> None:
    """ConfigError for what is no address of a cluster."""
    if address is None or address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in address or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"ray.address is HOST:PORT of a Ray cluster that this machine is a node of, or auto; not {address!r}"
        )


def _reach(address: str) -> None:
    """Ray itself would try for a minute and more."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except OSError as error:
        raise ConfigError(f"ray.address: nothing answers at {address}: {error.strerror or error}") from error


def _init(ray: Any, config: RayConfig, cpus: float) -> None:
    """In a thread: there Ray leaves the handlers of signals alone, which are ours."""
    if config.address not in (None, "auto"):
        _reach(str(config.address))
    local: dict[str, Any] = {}
    if config.address is None:
        if TOKEN_ENV not in os.environ and MODE_ENV not in os.environ:  # else Ray writes one into the home folder
            os.environ[TOKEN_ENV] = secrets.token_hex(32)
        local = {"include_dashboard": False, "num_cpus": _cpus(config, cpus)}
    try:
        ray.init(
            address=config.address or "local",
            namespace=f"turnwise-{secrets.token_hex(4)}",
            logging_level=logging.ERROR,
            log_to_driver=True,
            configure_logging=False,
            **local,
        )
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, OSError, ray.exceptions.RayError) as error:
        where = "start Ray here" if config.address is None else f"join the Ray cluster at {config.address}"
        raise ConfigError(f"ray.address: cannot {where}: {one_line(error)[:500]}") from error


@contextlib.contextmanager
def _on_loopback(config: RayConfig) -> Iterator[None]:
    """Of a cluster that is started here nobody listens on a network. Ray's processes read the variable when they start,
    Ray itself when it was imported, which may have been long ago."""
    if config.address is not None:
        yield
        return
    constants: Any = importlib.import_module("ray._private.ray_constants")
    before = os.environ.get(LOOPBACK_ENV), constants.ENABLE_RAY_CLUSTER
    os.environ[LOOPBACK_ENV], constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before[1]
        if before[0] is None:
            os.environ.pop(LOOPBACK_ENV, None)
        else:
            os.environ[LOOPBACK_ENV] = before[0]


def _cpus(config: RayConfig, cpus: float) -> int:
    """Of a cluster that is started here: enough for all that was asked for, since it is one machine anyway."""
    services = config.scorers + config.sandboxes
    least = config.samplers * config.sampler_cpus + config.learner_cpus + services * config.service_cpus
    return max(os.cpu_count() or 1, int(max(least, cpus)) + 1)


def alone(config: Config) -> Config:
    """The config as an actor reads it: what it opens is on its own node."""
    return replace(config, cluster=ONE_MACHINE)
