"""The ranks of a learner as actors on nodes: implements `Ranks`, and is used by the actor that the learner lives in."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from turnwise.cluster.connection import Place, last_line, load_ray, room_of
from turnwise.cluster.rank_actor import Home, RankActor
from turnwise.cluster.stored_weights import WeightsPlan
from turnwise.cluster.watchdog import WATCH, ask_beat
from turnwise.config import ClusterConfig
from turnwise.engines.learners.rank_group import GRACE_SECONDS, Failed, RankLost, raise_first
from turnwise.engines.learners.rank_setup import RankPlace, RankSetup
from turnwise.engines.learners.rank_watch import BEAT_SECONDS, Watch
from turnwise.errors import ConfigError, EngineError


class ActorRanks:
    """An actor for each bundle of a placement group, `devices` one for each; they end with the process that made them.

    Arguments and answers above Ray's 100 kB go through the object store: a rank is sent its own share and no other.
    """

    def __init__(self, group: Any, devices: Sequence[str], cluster: ClusterConfig, hang_seconds: float) -> None:
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
        """How many."""
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
            (meeting,) = self._ask("meeting", [(together,)], GRACE_SECONDS)[0]
            threads = max(1, int(self._cluster.learner_cpus))
            places = [RankPlace(n, self.size, meeting, device, threads) for n, device in enumerate(self._devices)]
            self._ask("open", [(setup, place) for place in places], grace=0.0)
        except BaseException:
            self.stop()
            raise

    def _begin(self) -> None:
        """Actors in their bundles; where a node went away, Ray looks for another one first."""
        strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        chosen, here = self._cluster, Place.here()
        for number in range(self.size):
            made = self._ray.remote(concurrency_groups={WATCH: 1})(RankActor).options(
                num_cpus=chosen.learner_cpus,
                num_gpus=chosen.learner_gpus,
                max_restarts=0,
                scheduling_strategy=strategy(self._group, placement_group_bundle_index=number),
            )
            self._actors.append(made.remote(here, number))
        self._gone = None
        asked = [actor.home.remote() for actor in self._actors]
        _, waiting = self._ray.wait(asked, num_returns=self.size, timeout=chosen.wait_seconds)
        if waiting:
            raise EngineError(
                f"no node had room for {len(waiting)} of {self.size} ranks of {chosen.learner_cpus:g} CPUs and "
                f"{chosen.learner_gpus:g} GPUs within cluster.wait_seconds={chosen.wait_seconds:g}: the cluster has "
                f"{room_of(self._ray)}, not all of them free"
            )
        self.homes = [self._got(number, "start", ref) for number, ref in enumerate(asked)]

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """See `Ranks.call`."""
        return self._ask(method, arguments, GRACE_SECONDS)[0]

    def parts(self, plan: WeightsPlan) -> Iterator[Any]:
        """References to the objects of an update, which the first rank puts into the store of its node."""
        self.call("begin_parts", [(plan,)] * self.size)
        for _ in plan.parts:
            yield self._ask("next_part", [()] * self.size, GRACE_SECONDS)[1][0]

    def sees(self, file: str) -> bool:
        """Whether all see a file of the caller's; ConfigError where ranks on several nodes do not.

        Those of one node may write into a folder of theirs, which is then sent.
        """
        seen = self.call("has_file", [(file,)] * self.size)
        blind = [number for number, found in enumerate(seen) if not found]
        if blind and len({home.node for home in self.homes}) > 1:
            raise ConfigError(
                f"learner.processes={self.size}: rank {blind[0]} on {self.nodes(blind[:1])} does not see "
                f"{Path(file).parent}; ranks on several nodes write checkpoints together: put runs_dir on a disk that "
                "all nodes see under the same path"
            )
        return not blind

    def _ask(self, method: str, arguments: Sequence[tuple[Any, ...]], grace: float) -> tuple[list[Any], list[Any]]:
        """The answers of the ranks that there are arguments for, and the references to them."""
        with self._lock:
            if self._gone is not None:
                raise RankLost(f"the learner's ranks are gone: {self._gone}")
            actors = self._actors[: len(arguments)]
            refs = [actor.call.remote(method, *given) for actor, given in zip(actors, arguments, strict=True)]
            found = self._answers(method, refs, grace)
            if (torn := raise_first(found)) is not None:
                self._stop(str(torn))
                raise torn
            return found, refs

    def _answers(self, method: str, refs: Sequence[Any], grace: float) -> list[Any]:
        waiting, answers = dict(enumerate(refs)), dict[int, Any]()
        watch, beats = Watch(self.size, self._limit), dict[int, Any]()
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
                self._stop(f"rank {failed} failed while it was {method}")
                answers[failed].throw(failed)
            for number in self._ready(beats, 0.0):
                watch.note(number, self._got(number, method, beats.pop(number)))
            for number in waiting.keys() - beats.keys():
                beats[number] = ask_beat(self._actors[number])
            if not ready and (problem := watch.hangs(sorted(waiting))) is not None:
                self._stop(problem)
                places = self.nodes(sorted(waiting))
                raise RankLost(f"the learner hangs in `{method}` and is ended: {problem}; on {places}")
        return [answers[number] for number in sorted(answers)]

    def _ready(self, asked: dict[int, Any], seconds: float) -> list[int]:
        """Those whose answer is there, after this long at most."""
        if not asked:
            return []
        done, _ = self._ray.wait(list(asked.values()), num_returns=len(asked), timeout=seconds)
        return [number for number, ref in asked.items() if ref in done]

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
        problem += f" went away in `{method}` ({type(error).__name__}{why})"
        self._stop(problem)
        raise RankLost(f"the learner lost a rank and with it its state: {problem}") from error

    def nodes(self, numbers: Sequence[int] | None = None) -> str:
        """The nodes of these ranks, or of all with their ranks: `10.0.0.1 (a1b2): ranks 0, 1; ...`."""
        if numbers is not None:
            return ", ".join(dict.fromkeys(self.homes[number].node for number in numbers))
        held: dict[str, list[str]] = {}
        for home in self.homes:
            held.setdefault(home.node, []).append(str(home.rank))
        return "; ".join(f"{node}: rank {', '.join(ranks)}" for node, ranks in held.items())

    def stop(self) -> None:
        """End them all."""
        self._stop("they were ended")

    def _stop(self, why: str) -> None:
        if self._gone is None:
            self._gone = why
        for actor in self._actors:
            with contextlib.suppress(self._ray.exceptions.RayError, ValueError):  # of a cluster that is gone
                self._ray.kill(actor)
