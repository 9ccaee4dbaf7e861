"""The learner in an actor as the training loop sees it; one that dies is made again from the last checkpoint.

Batches go through the object store and stay there until two checkpoints later: a new learner loads the last whole
checkpoint and learns again from what came after it, so that no step is lost and none is repeated in the run.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

import torch

from turnwise.engines.learners.hosting import LearnerReply
from turnwise.engines.learners.learner import Floats, Objective, TokenBatch, UpdateResult, Who
from turnwise.engines.learners.process_group import LearnerLost
from turnwise.engines.weight_updates import StoredWeights
from turnwise.errors import EngineError, EngineLost
from turnwise.ext.ray.connection import Connection, Say
from turnwise.ext.ray.learner_actor import CHUNK_BYTES, LearnerFacts, StaleWeights
from turnwise.ext.ray.watchdog import ask_beat
from turnwise.ext.ray.weight_store import WeightsPlan
from turnwise.storage.checkpoints import find_checkpoint
from turnwise.storage.run_dir import RunDir

MOST_LOSSES = 3
"""In a row, without an update in between; then something kills every learner."""
MOST_TRIES = 6
"""To make a lost one again. They are of one loss: nodes that went away together are known to be gone one by one."""
PAUSE_SECONDS = 5.0
"""More before each further try."""

STALE_SECONDS = 1.0
"""Before a sampler asks again for weights that the learner has already changed."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Learned:
    """An update that was made, and from which number of updates on."""

    step: int
    batches: Any
    objective: Objective


class LearnerWeights(StoredWeights):
    """An update of a sampler whose tensors lie in the object store. Read by any number of samplers."""

    def __init__(self, learner: "ActorLearner", step: int) -> None:
        self.plan: WeightsPlan = learner.facts.plan
        self._learner, self._step = learner, step
        self._lock = asyncio.Lock()
        self._put()

    def _put(self) -> None:
        self._by, self._refs = self._learner.put_weights(self._step)

    async def parts(self) -> list[Any]:
        """References to all parts, once they are in the store; those of a learner that died are put again."""
        async with self._lock:
            while True:
                refs = self._refs
                try:
                    with self._learner.connection.calling("the learner"):
                        await refs[-1]
                    return refs[:-1]
                except StaleWeights as error:
                    await asyncio.sleep(STALE_SECONDS)
                    raise EngineLost(f"{error}: newer weights are on their way") from error
                except (EngineLost, LearnerLost) as error:
                    await asyncio.to_thread(self._learner.revive, self._by, error)
                    self._put()

    def put_again(self, lost: Sequence[Any]) -> None:
        """These parts could not be read: their node went away."""
        if self._refs[:-1] == list(lost):
            self._put()


class ActorLearner:
    """Implements `Learner`. All but `weights` waits for the actor: call it from a thread."""

    def __init__(self, connection: Connection, make: Callable[[], Any], say: Say, hang_seconds: float) -> None:
        self.connection = connection
        self._hang_seconds = hang_seconds
        self.losses = 0
        """How often the actor went away, so far."""
        self.device = torch.device("cpu")
        """Of this process, where nothing is computed; `facts` say where the actor computes."""
        self._make = make
        self._say = say
        self._actor: Any = None
        self._log: list[_Learned] = []
        self._checkpoints: Path | None = None
        self._saved_at = 0
        """The step of the last save: what came before it may be forgotten at the next."""
        self._in_a_row = 0
        self._closed = threading.Event()
        self._reviving = threading.Lock()
        self._step = 0
        self._budget = 0
        self._facts: LearnerFacts | None = None

    def start(self) -> LearnerFacts:
        """Make the actor; waits until a node has room for it and the model is loaded."""
        self._actor = actor = self._make()
        with self.connection.calling("the learner"):
            self._await_place(ask_beat(actor))
        self.connection.watchdog.watch(actor, self._hang_seconds, lambda words: self._end_silent(actor, words))
        facts: LearnerFacts = self._ask("open")
        self._facts = facts
        return facts

    def _await_place(self, beat: Any) -> None:
        """Nothing is lost by waiting for a node, but it must be known."""
        connection = self.connection
        while not connection.ray.wait([beat], timeout=connection.config.wait_seconds)[0]:
            self._say(
                f"the learner waits for a node with room: the cluster has {connection.room()}, not all of it free"
            )
        connection.ray.get(beat)

    @property
    def facts(self) -> LearnerFacts:
        """What is known of the running actor: its node, its device and whether it is exact."""
        if self._facts is None:
            raise EngineError("the learner is not open")
        return self._facts

    @property
    def step(self) -> int:
        """How many times the weights have changed."""
        return self._step

    @property
    def token_budget(self) -> int:
        """Tokens of one pass that it had room for when it last answered."""
        return self._budget

    def score(self, batch: TokenBatch, who: Who) -> Floats:
        """One number [N] for every policy token, without gradient."""
        scores: Floats = self._surely(lambda: self._ask("score", batch, who))
        return scores

    def update(self, batches: Sequence[TokenBatch], objective: Objective) -> UpdateResult:
        """One optimizer step; its batches are kept in the object store until they are part of a checkpoint."""
        stored, step = self.connection.ray.put(list(batches)), self._step
        result: UpdateResult = self._surely(lambda: self._ask("update", stored, objective))
        self._log.append(_Learned(step, stored, objective))
        self._in_a_row = 0
        return result

    def weights(self) -> LearnerWeights:
        """The policy's weights as they are after the last update, put into the object store once for all samplers."""
        return LearnerWeights(self, self._step)

    def put_weights(self, step: int) -> tuple[Any, list[Any]]:
        """The actor that puts them, and references to the parts of the weights after this many updates; the last one is
        to a number, when all are there."""
        actor, count = self._actor, len(self.facts.plan.parts) + 1
        return actor, actor.weights.options(num_returns=count).remote(step)

    def save(self, folder: Path) -> None:
        """Everything needed to go on from here."""
        self._surely(lambda: self._save(folder, policy=False))
        self._checkpoints = folder.parent
        self._log = [
            update for update in self._log if update.step >= self._saved_at
        ]  # the save before this one is whole
        self._saved_at = self._step

    @property
    def saving(self) -> bool:
        """Never: `save` returns when all is written."""
        return False

    def saved(self) -> None:
        """Does nothing: `save` returns only when the state is written."""

    def save_policy(self, folder: Path) -> None:
        """The policy as others load it."""
        self._surely(lambda: self._save(folder, policy=True))

    def save_adapter(self, folder: Path) -> bool:
        """Not from here: samplers of a cluster are given all weights, an adapter merged."""
        return False

    def load(self, folder: Path) -> None:
        """Continues from a saved state."""
        self._surely(lambda: self._load(folder))
        self._checkpoints, self._log, self._saved_at = folder.parent, [], self._step

    def close(self) -> None:
        """End the actor; a call that waits for it fails."""
        self._closed.set()
        if self._actor is not None:
            self.connection.kill(self._actor)

    # --- calls ------------------------------------------------------------------------------------------------------

    def _ask(self, method: str, *args: Any, **options: Any) -> Any:
        with self.connection.calling("the learner"):
            reply: LearnerReply = self.connection.ray.get(getattr(self._actor, method).remote(*args, **options))
        self._step, self._budget = reply.step, reply.token_budget
        for note in reply.notes:
            self._say(f"learner: {note}")
        return reply.value

    def _surely(self, work: Callable[[], T]) -> T:
        """Do the work, again with a new learner if this one goes away."""
        while True:
            actor = self._actor
            try:
                return work()
            except (EngineLost, LearnerLost) as error:
                self.revive(actor, error)

    def _save(self, folder: Path, *, policy: bool) -> None:
        if self.shares(folder.parent):
            self._ask("save", str(folder), policy=policy)
            return
        begun: set[str] = set()
        with self.connection.calling("the learner"):
            for piece in self._actor.saved.options(num_returns="streaming").remote(policy=policy):
                name, content = self.connection.ray.get(piece)
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab" if name in begun else "wb") as file:  # a try before may have left half of it
                    file.write(content)
                begun.add(name)

    def _load(self, folder: Path) -> None:
        if self.shares(folder.parent):
            self._ask("load", str(folder))
            return
        with self.connection.calling("the learner"):
            for path in sorted(entry for entry in folder.rglob("*") if entry.is_file()):
                with path.open("rb") as file:
                    while piece := file.read(CHUNK_BYTES):
                        name = path.relative_to(folder).as_posix()
                        self.connection.ray.get(self._actor.receive.remote(name, piece))
        self._ask("load_received")

    def shares(self, folder: Path) -> bool:
        """Whether the learner's node sees this folder; ConfigError when ranks on several nodes do not all see it."""
        mark = folder / f".seen-{token_hex(8)}.tmp"
        mark.touch()
        try:
            with self.connection.calling("the learner"):
                return bool(self.connection.ray.get(self._actor.sees.remote(str(mark.resolve()))))
        finally:
            mark.unlink(missing_ok=True)

    # --- a learner that went away -----------------------------------------------------------------------------------

    def revive(self, lost: Any, error: EngineError) -> None:
        """Another learner instead of one that went away, with the same weights and moments."""
        with self._reviving:
            if self._closed.is_set():
                raise EngineError("the learner is closed")
            if lost is not self._actor:
                return  # somebody else was faster
            wanted = self._step
            self.losses += 1
            self._in_a_row += 1
            if self._in_a_row > MOST_LOSSES:
                raise EngineError(f"the learner was lost {self._in_a_row} times in a row: {error}")
            for tries in range(MOST_TRIES):
                self._say(f"{error}; it is restored from the last checkpoint")
                self.connection.kill(self._actor)
                if self._closed.wait(tries * PAUSE_SECONDS):
                    raise EngineError("the learner is closed")
                try:
                    self._say(self._restore(wanted))
                    return
                except (EngineLost, LearnerLost) as again:
                    error = again
            raise EngineError(f"the learner could not be restored in {MOST_TRIES} tries: {error}")

    def _end_silent(self, actor: Any, words: str) -> None:
        """Whoever waits for it hears that it went away, as of one that was killed."""
        self._say(f"the learner {words} (learner.hang_seconds) and is ended")
        self.connection.kill(actor)

    def _restore(self, wanted: int) -> str:
        """Load the last whole checkpoint and learn again up to so many updates; what was done, in words."""
        self.start()
        search = None if self._checkpoints is None else find_checkpoint(RunDir(self._checkpoints.parent), lambda f: f)
        source = "the start"
        if search is not None and search.checkpoint is not None:
            self._load(search.checkpoint.folder)
            source = f"checkpoint {search.checkpoint.folder.name}"
        after = [update for update in self._log if update.step >= self._step]
        if self._step + len(after) != wanted or (after and after[0].step != self._step):
            raise EngineError(
                f"the learner was lost after {wanted} updates, and {source} has only {self._step}: the updates "
                "in between are not recorded; resume the run"
            )
        for update in after:
            self._ask("update", update.batches, update.objective)
        return f"the learner is on {self.facts.node} now: restored from {source}, {len(after)} update(s) repeated"
