"""The ranks of a learner as actors on nodes: implements `Ranks`, and is used by the actor that the learner lives in."""

import contextlib
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from turnwise.engines.learners.learner import TokenBatch
from turnwise.engines.learners.process_group import GRACE_SECONDS, Failed, LearnerLost, failed, raise_first
from turnwise.engines.learners.watching import BEAT_SECONDS, Beat, HangWatch, beat
from turnwise.engines.model.sources import find_model
from turnwise.errors import ConfigError, EngineError
from turnwise.ext.fsdp.rank_group import rank_names
from turnwise.ext.fsdp.rank_setup import RankPlace, RankSetup
from turnwise.ext.ray.calls import last_line
from turnwise.ext.ray.config import RayConfig
from turnwise.ext.ray.connection import SearchPath, load_ray, room_of
from turnwise.ext.ray.messages import own_arrays
from turnwise.ext.ray.sampler_actor import node_name
from turnwise.ext.ray.watchdog import WATCH, ask_beat
from turnwise.ext.ray.weight_store import Part, WeightsPlan, pack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from turnwise.ext.fsdp.rank import Rank


class ActorRanks:
    """An actor for each bundle of a placement group, `devices` one for each; they end with the process that made them.

    Arguments and answers above Ray's 100 kB go through the object store: a rank is sent its own share and no other.
    """

    def __init__(self, group: Any, devices: Sequence[str], cluster: RayConfig, hang_seconds: float) -> None:
        self._ray = load_ray()
        self._group, self._devices, self._cluster = group, tuple(devices), cluster
        self._limit = hang_seconds
        self._lock = threading.Lock()
        self._actors: list[Any] = []
        self._gone: str | None = "they were not started"
        self.homes: list[Home] = []
        """Where they are, once they are started."""

    @property
    def size(self) -> int:
        """How many ranks there are, one for each device."""
        return len(self._devices)

    @property
    def device(self) -> str:
        """What each of them computes on."""
        return self._devices[0].partition(":")[0]

    def start(self, setup: RankSetup) -> None:
        """Make the actors if they are not there yet, and wait until all have opened their rank."""
        try:
            if not self._actors:
                self._begin()
            together = len({home.node for home in self.homes}) == 1
            (meeting,) = self._ask("meeting", [(together,)], GRACE_SECONDS)
            threads = max(1, int(self._cluster.learner_cpus))
            places = [RankPlace(n, self.size, meeting, device, threads) for n, device in enumerate(self._devices)]
            self._ask("open", [(setup, position) for position in places], grace=0.0)
        except BaseException:
            self.stop()
            raise

    def _begin(self) -> None:
        """Actors in their bundles; where a node went away, Ray looks for another one first."""
        strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        chosen, here = self._cluster, SearchPath.here()
        for number in range(self.size):
            actor_class = self._ray.remote(concurrency_groups={WATCH: 1})(RankActor).options(
                num_cpus=chosen.learner_cpus,
                num_gpus=chosen.learner_gpus,
                max_restarts=0,
                scheduling_strategy=strategy(self._group, placement_group_bundle_index=number),
            )
            self._actors.append(actor_class.remote(here, number))
        self._gone = None
        refs = [actor.home.remote() for actor in self._actors]
        _, waiting = self._ray.wait(refs, num_returns=self.size, timeout=chosen.wait_seconds)
        if waiting:
            raise EngineError(
                f"no node had room for {len(waiting)} of {self.size} ranks of {chosen.learner_cpus:g} CPUs and "
                f"{chosen.learner_gpus:g} GPUs within ray.wait_seconds={chosen.wait_seconds:g}: the cluster has "
                f"{room_of(self._ray)}, not all of them free"
            )
        self.homes = [self._got(number, "start", ref) for number, ref in enumerate(refs)]

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls a method of every rank, as `Ranks.call` says."""
        return self._ask(method, arguments, GRACE_SECONDS)

    def parts(self, plan: WeightsPlan) -> Iterator[Any]:
        """References to the objects of an update, which the ranks in turn put into the stores of their nodes: each
        copies its share, and each node sends its own."""
        self.call("begin_parts", [(plan,)] * self.size)
        for number in range(len(plan.parts)):
            with self._lock:
                self._refuse_gone()
                made = [actor.next_part.options(num_returns=2).remote() for actor in self._actors]
                self._settled("next_part", [done for done, _ in made], GRACE_SECONDS)
            yield made[number % self.size][1]

    def sees(self, file: str) -> bool:
        """Whether all see a file of the caller's; ConfigError where ranks on several nodes do not.

        Those of one node may write into a folder of theirs, which is then sent.
        """
        answers = self.call("has_file", [(file,)] * self.size)
        missing = [number for number, has_file in enumerate(answers) if not has_file]
        if missing and len({home.node for home in self.homes}) > 1:
            raise ConfigError(
                f"learner.processes={self.size}: rank {missing[0]} on {self.nodes(missing[:1])} does not see "
                f"{Path(file).parent}; ranks on several nodes write checkpoints together: put runs_dir on a disk that "
                "all nodes see under the same path"
            )
        return not missing

    def _ask(self, method: str, arguments: Sequence[tuple[Any, ...]], grace: float) -> list[Any]:
        """The answers of the ranks that there are arguments for."""
        with self._lock:
            self._refuse_gone()
            actors = self._actors[: len(arguments)]
            refs = [actor.call.remote(method, *values) for actor, values in zip(actors, arguments, strict=True)]
            return self._settled(method, refs, grace)

    def _refuse_gone(self) -> None:
        if self._gone is not None:
            raise LearnerLost(f"the learner's ranks are gone: {self._gone}")

    def _settled(self, method: str, refs: Sequence[Any], grace: float) -> list[Any]:
        answers = self._answers(method, refs, grace)
        if (torn := raise_first(answers, rank_names(self.size)[: len(answers)])) is not None:
            self._stop(str(torn))
            raise torn
        return answers

    def _answers(self, method: str, refs: Sequence[Any], grace: float) -> list[Any]:
        waiting, answers = dict(enumerate(refs)), dict[int, Any]()
        watch, beats = HangWatch(rank_names(self.size), self._limit), dict[int, Any]()
        failed, deadline = -1, float("inf")
        while waiting:
            left = min(BEAT_SECONDS, max(0.0, deadline - time.monotonic()))
            ready = self._ready(waiting, left)
            for number in ready:
                answers[number] = self._got(number, method, waiting.pop(number))
                watch.note(number, None)
                if isinstance(answers[number], Failed) and failed < 0:
                    failed, deadline = number, time.monotonic() + grace
            if not ready and time.monotonic() >= deadline:  # the others hang in a collective that a failed one left
                self._stop(f"rank {failed} failed in `{method}`")
                answers[failed].throw(rank_names(self.size)[failed])
            for number in self._ready(beats, 0.0):
                watch.note(number, self._got(number, method, beats.pop(number)))
            for number in waiting.keys() - beats.keys():
                beats[number] = ask_beat(self._actors[number])
            if not ready and (problem := watch.hangs(sorted(waiting))) is not None:
                self._stop(problem)
                places = self.nodes(sorted(waiting))
                raise LearnerLost(f"the learner hangs in `{method}` and is ended: {problem}; on {places}")
        return [answers[number] for number in sorted(answers)]

    def _ready(self, refs: dict[int, Any], seconds: float) -> list[int]:
        """Those whose answer is there, after this long at most."""
        if not refs:
            return []
        done, _ = self._ray.wait(list(refs.values()), num_returns=len(refs), timeout=seconds)
        return [number for number, ref in refs.items() if ref in done]

    def _got(self, number: int, method: str, ref: Any) -> Any:
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            self._lost(number, method, error)

    def _lost(self, number: int, method: str, error: Exception) -> NoReturn:
        problem = f"rank {number} of {self.size}" + (f" on {self.nodes([number])}" if self.homes else "")
        if getattr(error, "actor_init_failed", False):  # turnwise itself is not there
            self._stop(problem)
            raise EngineError(f"{problem} cannot run on its node: {last_line(error)}") from error
        why = "" if isinstance(error, self._ray.exceptions.RayActorError) else f": {last_line(error)}"
        problem += f" was lost in `{method}` ({type(error).__name__}{why})"
        self._stop(problem)
        raise LearnerLost(f"the learner lost a rank and with it its state: {problem}") from error

    def nodes(self, numbers: Sequence[int] | None = None) -> str:
        """The nodes of these ranks, or of all with their ranks: `10.0.0.1 (a1b2): ranks 0, 1; ...`."""
        if numbers is not None:
            return ", ".join(dict.fromkeys(self.homes[number].node for number in numbers))
        held: dict[str, list[str]] = {}
        for home in self.homes:
            held.setdefault(home.node, []).append(str(home.rank))
        return "; ".join(f"{node}: rank {', '.join(ranks)}" for node, ranks in held.items())

    def stop(self) -> None:
        """Ends the actors of all ranks; what waits for them fails."""
        self._stop("they were ended")

    def _stop(self, why: str) -> None:
        if self._gone is None:
            self._gone = why
        for actor in self._actors:
            with contextlib.suppress(self._ray.exceptions.RayError, ValueError):  # of a cluster that is gone
                self._ray.kill(actor)


OWN = ("meeting", "open", "has_file", "begin_parts")
"""What the actor answers; all else is a method of its rank."""
LOOPBACK = "127.0.0.1"
_GET_ADDRESS = 0x8915
"""Of an interface, as Linux numbers what it can be asked."""


@dataclass(frozen=True, slots=True)
class Home:
    """The node that a rank runs on, and its number."""

    node: str
    """As people know it."""
    rank: int


class RankActor:
    """Hosts a `rank.Rank`. Calls come one after the other in one thread, `beat` is answered by another."""

    def __init__(self, path: SearchPath, number: int) -> None:
        path.enter()
        self._number, self._size = number, 1
        self._worker = 0
        self._rank: Rank | None = None
        self._parts: Iterator[Part | None] = iter(())
        self._store: Any = None

    def home(self) -> Home:
        """The node and number of this rank."""
        return Home(node_name(), self._number)

    def beat(self) -> Beat:
        """A sign of life of the process, for the watchdog."""
        return beat(self._worker)

    def call(self, method: str, *given: Any) -> Any:
        """A method of this class or of the rank; what it raises is an answer too."""
        self._worker = threading.get_ident()
        try:
            if method in OWN:
                return getattr(self, method)(*given)
            return getattr(self._opened(), method)(*map(_owned, given))
        except Exception as error:  # it is raised where the call came from
            return failed(error)

    def meeting(self, together: bool) -> str:
        """Serve a place where the ranks find each other, on this node's own address and a port that is free there.

        Where they are `together` on one node, nobody else can reach it.
        """
        from torch._C._distributed_c10d import TCPStore

        address = LOOPBACK if together else load_ray().util.get_node_ip_address()
        listening = socket.create_server((address, 0), family=_family(address))
        port = listening.getsockname()[1]
        self._store = TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=listening.detach())
        return f"tcp://{f'[{address}]' if ':' in address else address}:{port}"

    def open(self, setup: RankSetup, position: RankPlace) -> None:
        """Join the others and read the model, whose files this node finds by itself."""
        from turnwise.ext.fsdp.rank import Rank

        together = position.rendezvous.startswith(f"tcp://{LOOPBACK}:")
        if (interface := _interface(LOOPBACK if together else load_ray().util.get_node_ip_address())) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # else the one that the host's name leads to
        if together and interface is not None:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        if self._rank is not None:
            self._rank.leave()
        source = find_model(setup.source.name, setup.source.trust_remote_code)
        self._rank, self._size = Rank(replace(setup, source=source), position), position.size

    def has_file(self, file: str) -> bool:
        """Whether a file of the caller's is on a disk that is shared."""
        return os.path.isfile(file)

    def begin_parts(self, plan: WeightsPlan) -> None:
        """Start to give the policy's weights as objects of the store."""
        import torch

        stream = self._opened().whole_weights(getattr(torch, plan.dtype))
        self._parts = pack(plan, stream, owner=self._number, owners=self._size)

    def next_part(self) -> tuple[Failed | None, Part | None]:
        """How it went, and the next object where it is this rank's: two results, of which nobody but samplers fetches
        the second. Every rank makes the weights whole."""
        import torch

        self._worker = threading.get_ident()
        try:
            with torch.no_grad():
                return None, next(self._parts)
        except Exception as error:  # it is raised where the call came from
            return failed(error), None

    def _opened(self) -> "Rank":
        if self._rank is None:
            raise EngineError("the rank is not open")
        return self._rank


def _owned(argument: Any) -> Any:
    """With arrays of its own, where these are batches."""
    if isinstance(argument, list):
        return [own_arrays(entry) if isinstance(entry, TokenBatch) else entry for entry in argument]
    return argument


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _interface(address: str) -> str | None:
    """The network interface that has an address; None where the system does not tell."""
    if sys.platform != "linux" or ":" in address:
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(asking.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None
