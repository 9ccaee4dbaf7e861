"""What an episode worker runs in: a process of this machine behind a socket, or what a guest brings in its place."""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.engines.samplers.sampler import Sampler
from turnwise.rollout.workers.images import Adopt
from turnwise.rollout.workers.link import WorkerLink
from turnwise.system import children

WORKER = "turnwise.rollout.workers.worker"
POLL_SECONDS = 0.005


class RunLink(Protocol):
    """One end of the way between a run and a worker: as `WorkerLink`."""

    def send(self, message: object) -> None:
        """With whatever else is sent before the event loop comes round."""
        ...

    async def receive(self) -> list[Any]:
        """The next messages; LinkLost when there will be none."""
        ...

    async def drain(self) -> None:
        """Until what was sent has been taken."""
        ...

    def close(self) -> None:
        """Nothing more is sent or received."""
        ...


class Host(Protocol):
    """One of them, from its start to its end."""

    @property
    def name(self) -> str:
        """As people read it in messages: `episode worker 4711`."""
        ...

    @property
    def link(self) -> RunLink:
        """The run's end."""
        ...

    def kill(self) -> None:
        """End it, whatever it does."""
        ...

    async def ended(self) -> str:
        """Returns when it has ended by itself or was killed; how, in words."""
        ...

    async def reaped(self) -> str:
        """The same, once it is told that nobody needs it; afterwards nothing of it is left."""
        ...


class Hosts(Protocol):
    """Where a run's workers are."""

    @property
    def sampler(self) -> Sampler | None:
        """Whom the run has write the turns that workers ask it for; None where they ask for themselves."""
        ...

    @property
    def tries(self) -> int:
        """How often one may be lost before it has begun."""
        ...

    async def make(self) -> Host:
        """A new one, to be told what it is for; waits for as long as there is no room."""
        ...

    async def begun(self, starting: "Sequence[asyncio.Task[Sequence[str]]]") -> Sequence[str]:
        """Returns when enough of these are there for the run to begin, with what the first gave."""
        ...

    def left(self, host: Host) -> None:
        """It is not there any more."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class HostProcess:
    """A process of this machine."""

    process: children.Process
    link: RunLink

    @property
    def name(self) -> str:
        """With the number that the system knows it by."""
        return f"episode worker {self.process.pid}"

    def kill(self) -> None:
        """With all that it has started."""
        children.kill(self.process)

    async def ended(self) -> str:
        """Looks again and again: no signal is waited for, which others may want."""
        while (status := self.process.poll()) is None:
            await asyncio.sleep(POLL_SECONDS)
        return children.exit_words(status)

    async def reaped(self) -> str:
        """Its socket and its lifeline are cut."""
        self.link.close()
        children.cut(self.process)
        return await self.ended()


@dataclass(frozen=True, slots=True)
class HostsHere:
    """Processes of this machine, all of them from the start."""

    sampler: Sampler | None
    adopt: Adopt | None = None
    """How images that workers prepared are kept here."""
    tries: int = 1

    async def make(self) -> HostProcess:
        """A fresh interpreter at the other end of a socket pair."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            link = await WorkerLink.open(ours, self.adopt)
            return HostProcess(children.start_interpreter(WORKER, theirs.fileno()), link)

    async def begun(self, starting: "Sequence[asyncio.Task[Sequence[str]]]") -> Sequence[str]:
        """What keeps one of them from starting is raised."""
        notes = [await task for task in starting]
        return notes[0]

    def left(self, host: Host) -> None:
        """Nobody else has to know."""
