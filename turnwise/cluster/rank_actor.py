"""The actor of one rank of a learner: it has a process and a device to itself, and says of itself that it lives."""

import os
import socket
import struct
import sys
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from turnwise.cluster.connection import Place, load_ray
from turnwise.cluster.messages import own_arrays
from turnwise.cluster.sampler_actor import node_name
from turnwise.cluster.stored_weights import Part, WeightsPlan, pack
from turnwise.engines.learners.rank_group import failed
from turnwise.engines.learners.rank_setup import RankPlace, RankSetup
from turnwise.engines.learners.rank_watch import Beat, beat
from turnwise.engines.learners.token_batch import TokenBatch
from turnwise.engines.model.sources import find_model
from turnwise.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from turnwise.engines.learners.rank import Rank

OWN = ("meeting", "open", "has_file", "begin_parts", "next_part")
"""What the actor answers; all else is a method of its rank."""
LOOPBACK = "127.0.0.1"
_GET_ADDRESS = 0x8915
"""Of an interface, as Linux numbers what it can be asked."""


@dataclass(frozen=True, slots=True)
class Home:
    """Where a rank is."""

    node: str
    """As people know it."""
    rank: int


class RankActor:
    """Hosts a `rank.Rank`. Calls come one after the other in one thread, `beat` is answered by another."""

    def __init__(self, place: Place, number: int) -> None:
        place.enter()
        self._number = number
        self._worker = 0
        self._rank: Rank | None = None
        self._parts: Iterator[Part] = iter(())
        self._store: Any = None

    def home(self) -> Home:
        """Where this is."""
        return Home(node_name(), self._number)

    def beat(self) -> Beat:
        """A sign of life."""
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

    def open(self, setup: RankSetup, place: RankPlace) -> None:
        """Join the others and read the model, whose files this node finds by itself."""
        from turnwise.engines.learners.rank import Rank

        together = place.rendezvous.startswith(f"tcp://{LOOPBACK}:")
        if (interface := _interface(LOOPBACK if together else load_ray().util.get_node_ip_address())) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # else the one that the host's name leads to
        if together and interface is not None:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        if self._rank is not None:
            self._rank.leave()
        source = find_model(setup.source.name, setup.source.trust_remote_code)
        self._rank = Rank(replace(setup, source=source), place)

    def has_file(self, file: str) -> bool:
        """Whether a file of the caller's is on a disk that is shared."""
        return os.path.isfile(file)

    def begin_parts(self, plan: WeightsPlan) -> None:
        """Start to give the policy's weights as objects of the store."""
        self._parts = pack(plan, self._opened().whole_weights())

    def next_part(self) -> Part | None:
        """The next object; every rank makes the weights whole and the first one answers."""
        import torch

        with torch.no_grad():
            part = next(self._parts)
        return part if self._number == 0 else None

    def _opened(self) -> "Rank":
        if self._rank is None:
            raise EngineError("the rank is not open")
        return self._rank


def _owned(given: Any) -> Any:
    """With arrays of its own, where these are batches."""
    if isinstance(given, list):
        return [own_arrays(one) if isinstance(one, TokenBatch) else one for one in given]
    return given


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
                found = fcntl.ioctl(asking.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
