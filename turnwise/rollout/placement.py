"""Where sampler, learner, scorers and sandboxes of a run are: on this machine, or where a guest puts them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from turnwise import extensions
from turnwise.config import ONE_MACHINE, Config
from turnwise.engines.opener import LearnerParts, OpenPair, Say
from turnwise.engines.samplers.sampler import Sampler
from turnwise.scoring.service import Runner, make_runner
from turnwise.system.plugins import load

if TYPE_CHECKING:
    from turnwise.chat.renderer import Renderer
    from turnwise.rollout.workers.hosts import Hosts
    from turnwise.rollout.workers.images import Adopt


@dataclass(frozen=True, slots=True)
class Layout:
    """What each node of a cluster would hold, and what there is no room for."""

    nodes: list[str]
    """A line for each node."""
    short: str | None
    """What lacks, in one line: who has no place, the run's sum, and the cluster's."""
    busy: str | None = None
    """The same of what others have left free at the moment."""

    @property
    def lacking(self) -> str | None:
        """Why the run would wait now; None where it would not."""
        return self.short or self.busy


class Placement(Protocol):
    """Where the parts of a run are, for one config."""

    @property
    def samples(self) -> bool:
        """Whether the configured engine runs elsewhere than in this process."""
        ...

    def check(self, *, training: bool = False) -> None:
        """ConfigError for what cannot be done there, before anything is started."""
        ...

    def runner(self) -> Runner:
        """The runner that runs scorers there."""
        ...

    def services(self, say: Say) -> AbstractAsyncContextManager[None]:
        """Around a run: sandboxes are taken from there, and its news are said."""
        ...

    def open_sampler(self, renderer: "Renderer", say: Say) -> AbstractAsyncContextManager[Sampler]:
        """The sampler of an evaluation; it is closed on every path."""
        ...

    def open_pair(self, renderer: "Renderer", parts: LearnerParts, say: Say) -> AbstractAsyncContextManager[OpenPair]:
        """Sampler and learner of a training; they are ended on every path."""
        ...

    def worker_hosts(self, sampler: Sampler | None, adopt: "Adopt | None") -> "Hosts":
        """Where episode workers are, who have their turns written by this sampler of the run, or by their own; `adopt`
        says how images that they prepared are kept here."""
        ...

    def plan_lines(self, *, training: bool) -> list[str]:
        """The plan's lines about where everything is."""
        ...

    async def layout(self, *, training: bool) -> Layout | None:
        """Which node would hold what; None where there is this machine only."""
        ...

    async def no_services(self) -> str | None:
        """Why nothing can be scored or run there now; None where it can."""
        ...


@dataclass(frozen=True, slots=True)
class Here:
    """Everything on this machine."""

    config: Config
    samples: bool = False

    def check(self, *, training: bool = False) -> None:
        """There is nothing that a machine refuses to itself."""

    def runner(self) -> Runner:
        """The runner that `scoring.run` names, on this machine."""
        return make_runner(self.config.scoring)

    @asynccontextmanager
    async def services(self, say: Say) -> AsyncIterator[None]:
        """None beside those that tools and scorers start themselves."""
        yield

    @asynccontextmanager
    async def open_sampler(self, renderer: "Renderer", say: Say) -> AsyncIterator[Sampler]:
        """In this process, or servers that it talks to."""
        from turnwise.engines.open_configured import open_sampler

        sampler = (await open_sampler(self.config, renderer, say)).sampler
        try:
            yield sampler
        finally:
            await asyncio.shield(asyncio.ensure_future(sampler.close()))

    def open_pair(self, renderer: "Renderer", parts: LearnerParts, say: Say) -> AbstractAsyncContextManager[OpenPair]:
        """The learner in this process or in others of this machine."""
        from turnwise.engines.open_configured import open_pair

        return open_pair(self.config, renderer, parts, say)

    def worker_hosts(self, sampler: Sampler | None, adopt: "Adopt | None") -> "Hosts":
        """Processes of this machine, who ask this one."""
        from turnwise.rollout.workers.hosts import HostsHere

        return HostsHere(sampler, adopt)

    def plan_lines(self, *, training: bool) -> list[str]:
        """Nothing: that it is here goes without saying."""
        return []

    async def layout(self, *, training: bool) -> Layout | None:
        """None: this machine is no cluster's node."""
        return None

    async def no_services(self) -> str | None:
        """None: nothing here depends on another machine."""
        return None


def placement_of(config: Config) -> Placement:
    """Where a config has its parts run."""
    if config.cluster == ONE_MACHINE:
        return Here(config)
    placement: Placement = load(extensions.rows("places")[config.cluster].place, "cluster")(config)
    return placement
