"""What a group of ranks is to the sharded learner, and the one whose ranks are processes of this machine."""

import sys
from collections.abc import Sequence
from typing import Any, Protocol

from turnwise.engines.learners.process_group import ProcessGroup
from turnwise.ext.fsdp.rank_setup import RankPlace, RankSetup


class Ranks(Protocol):
    """A group of ranks, each a `rank.Rank` somewhere: processes here, or actors of a cluster."""

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def start(self, setup: RankSetup) -> None:
        """Open a rank in each place, in the stead of those that are there; an error of one ends all."""
        ...

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of every rank at once, as `ProcessGroup.call` says."""
        ...

    def stop(self) -> None:
        """End them all, whatever they are doing."""
        ...


def rank_names(size: int) -> list[str]:
    """What errors call the ranks of a group."""
    return [f"rank {number} of {size}" for number in range(size)]


class LocalRanks(ProcessGroup):
    """Ranks in processes of this machine; implements `Ranks`. `devices` has one for each: `("cpu", "cpu")`.

    They meet through a file.
    """

    def __init__(self, devices: Sequence[str], threads: int = 1, hang_seconds: float = 1800.0) -> None:
        names = rank_names(len(devices))
        # On what collectives listen, where the environment does not say otherwise: ranks of one machine.
        own = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo0" if sys.platform == "darwin" else "lo")
        super().__init__("turnwise.ext.fsdp.rank:Rank", names, threads, hang_seconds, variables=own)
        self._devices, self._meetings = tuple(devices), 0

    def start(self, setup: RankSetup) -> None:
        """Start the processes if they do not run yet, and wait until all have opened their rank."""
        try:
            self.begin()
            self._meetings += 1
            meeting = f"file://{self._folder}/meeting_{self._meetings}"
            places = [RankPlace(n, self.size, meeting, device, self._threads) for n, device in enumerate(self._devices)]
            self.open([(setup, position) for position in places])
        except BaseException:
            self.stop()
            raise
