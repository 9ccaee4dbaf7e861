"""Continuous batching on a device: several tokens per run, and the next run launched before the last one is read.

A turn waits, gets a slot and pages (those of its kept conversation, or of a prompt that began alike, are there
already), is fed in passes over many prompts, and decodes with all others. Everything is launched on one stream, so
what is launched later finds all that was launched before: pages are shared, freed and given out again at launch, while
the host learns of tokens one round later. Synchronous and owned by one thread.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from turnwise.engines.kernels.paged_attention import PAGE
from turnwise.engines.model.policy_model import PolicyModel
from turnwise.engines.samplers.gpu.graphs import Say
from turnwise.engines.samplers.gpu.paged_cache import CachedConversation, PagedCache, Pages
from turnwise.engines.samplers.gpu.pass_shapes import MOST_ROWS, PromptChunk
from turnwise.engines.samplers.gpu.slot_table import Slots, SlotTable
from turnwise.engines.samplers.gpu.steps import DeviceSteps
from turnwise.engines.samplers.gpu.transfers import Launched
from turnwise.engines.samplers.gpu.turns import RunningTurn
from turnwise.engines.samplers.in_flight import DecodeText, Outcome, QueuedRequest, SamplerStats, Writers
from turnwise.engines.samplers.prompt_images import PromptImages, encode_ahead
from turnwise.engines.weight_updates import FullWeights
from turnwise.errors import EngineError
from turnwise.system import time_budget
from turnwise.types import Completion, FinishReason

PASSES = 4
"""Passes over prompts before the next decode run: a batch that fills up first is decoded in fewer steps."""
KNOB = "engine.memory_fraction"


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """What is under way: whose rows these are, by slot and by how often the slot had changed hands."""

    launched: Launched
    slots: NDArray[np.int64]
    slot_generation: NDArray[np.int64]


class DeviceBatcher:
    """Implements `in_process.Batching` over `DeviceSteps`."""

    def __init__(
        self,
        model: PolicyModel,
        decode_text: DecodeText,
        steps: DeviceSteps,
        *,
        slots: int,
        pages: int,
        prefill_tokens: int,
        say: Say,
    ) -> None:
        self.stats = SamplerStats()
        self.policy_version = 0
        self.asleep = False
        self._model, self._decode_text, self._steps = model, decode_text, steps
        self._prefill_tokens, self._say = prefill_tokens, say
        self._most_rows = slots
        """Rows of one decode run; fewer than there are slots once the device ran out of memory."""
        self._pages = self._allocate(pages)
        self._cache = PagedCache(self._pages)
        self._turns: dict[str, RunningTurn] = {}
        """Every turn that waits or runs, by conversation."""
        self._waiting: deque[RunningTurn] = deque()
        self._feeding: list[RunningTurn] = []
        """With a slot, their prompts not handed over yet."""
        self._in_flight: deque[_Run] = deque()
        self._ended: list[Outcome] = []
        self._slots = SlotTable(slots, steps.max_pages, steps.state_rows)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not (self._turns or self._in_flight or self._ended)

    @property
    def bytes(self) -> int:
        """Memory held for keys and values."""
        return self._steps.bytes

    @property
    def cached_bytes(self) -> int:
        """The part that conversations hold between turns."""
        return self._cache.kept_pages * (self._steps.bytes // self._pages)

    def submit(self, request: QueuedRequest) -> Completion | EngineError | None:
        """Queue a request; one that needs no work or cannot be served is answered at once."""
        name, ids = request.conversation, request.token_ids
        if name in self._turns:
            return EngineError(f"conversation {name!r} is still writing its last turn")
        cached = self._cache.get(name)
        if cached is not None and (error := request.departs_from(cached.token_ids, cached.media)):
            return error
        limit = min(request.params.max_tokens, self._model.shape.context_length - len(ids))
        if limit <= 0:
            return Completion.of((), (), FinishReason.LENGTH, version=self.policy_version)
        carries = self._steps.state_rows is not None
        turn = RunningTurn(request, limit, Writers(self.policy_version), carries_states=carries)
        if request.media:
            try:
                turn.prompt_images = PromptImages(self._model, ids, request.media)
            except EngineError as error:
                return error
        self._turns[name] = turn
        self._waiting.append(turn)
        return None

    def cancel(self, request: QueuedRequest) -> None:
        """Drop a request wherever it is; its slot and pages are free at once and nothing of its turn is kept."""
        turn = self._turns.get(request.conversation)
        if turn is None or turn.request is not request:
            # It ended while the caller gave up: the cache holds a turn nobody has seen.
            self._cache.drop(request.conversation)
            return
        del self._turns[turn.name]
        if turn.slot < 0:
            self._waiting.remove(turn)
        else:
            self._cache.give(self._leave(turn))

    def release(self, conversation: str) -> None:
        """Forget a conversation; one still writing is forgotten when it ends."""
        self._cache.drop(conversation)
        if conversation in self._turns:
            self._turns[conversation].request.keep_cache = False

    def settle(self) -> list[Outcome]:
        """Wait for everything that is under way."""
        while self._in_flight:
            self._read(self._in_flight.popleft())
        return self._take_ended()

    def refuse(self, update: FullWeights) -> EngineError | None:
        """What is wrong with weights that are not this model's; nothing has changed then."""
        return update.refused_by(self._model.weight_shapes())

    def publish(self, update: FullWeights, version: int) -> None:
        """Write with other weights from the next step on.

        Whatever the old ones computed is forgotten, and computed anew for turns that are being written: a token's
        logprob is then what its writer gives it after everything before it, never a mixture of two policies.
        """
        self._stop_all()
        self._steps.load(update.tensors)
        self.policy_version = version
        for turn in self._turns.values():
            turn.written_by(version)

    def sleep(self) -> None:
        """Hold no keys and values, not even those of turns under way, until `wake`."""
        if self.asleep:
            return
        self._stop_all()
        self._steps.free()
        self.asleep = True

    def wake(self) -> None:
        """Go on from where everybody stood."""
        if not self.asleep:
            return
        pages = self._allocate(self._pages)
        if pages < self._pages:
            self._pages, self._cache = pages, PagedCache(pages)
        self.asleep = False

    def close(self) -> None:
        """Give all memory back; whoever still waits is told by others."""
        self._in_flight.clear()
        self._steps.free()

    def _allocate(self, pages: int) -> int:
        """Make the pool, of half as many pages where the device has not got them; how many there are."""
        while pages > 0:
            try:
                self._steps.allocate(pages)
                return pages
            except torch.OutOfMemoryError:
                self._say(
                    f"no room for a cache of {pages * PAGE} tokens, trying half of it; {KNOB} says how much to take"
                )
                pages //= 2
        raise EngineError(f"no GPU memory is left for the KV cache: change {KNOB}")

    def waited(self, request: QueuedRequest) -> float:
        """Seconds a request has waited for its slot or stood still; any thread may ask."""
        return request.waited()

    def step(self) -> list[Outcome]:
        """Launch passes over what waits and one decode run, then read what was launched in the step before."""
        before = self._in_flight[-1] if self._in_flight else None
        self._feed()
        self._decode()
        while before is not None and before in self._in_flight:
            self._read(self._in_flight.popleft())
        return self._take_ended()

    def _take_ended(self) -> list[Outcome]:
        ended, self._ended = self._ended, []
        return ended

    def _feed(self) -> None:
        """A pass that does not fit into memory changes nothing: its turns are still to be fed, by smaller ones."""
        budget = PASSES * self._prefill_tokens
        while budget > 0 and (chunks := self._next_chunks(min(budget, self._prefill_tokens))):
            budget -= sum(len(chunk.tokens) for _, chunk in chunks)
            self._prefill(chunks)

    def _next_chunks(self, budget: int) -> list[tuple[RunningTurn, PromptChunk]]:
        """The next prompts in order of arrival. One whose next page is being computed for another in this very pass is
        passed over; it finds the page in the next one."""
        work: list[tuple[RunningTurn, PromptChunk]] = []
        coming: set[bytes] = set()
        for turn in self._feeding:
            coming.update(turn.known_digests or ())
            if budget > 0:
                work.append((turn, turn.next_chunk(budget)))
                budget -= len(work[-1][1].tokens)
        passed_over: list[RunningTurn] = []
        if self._model.joins_images:
            encode_ahead(self._model, (turn.unfed(self._cache) for turn in self._waiting), len(self._slots.free))
        while self._waiting and self._slots.free and budget > 0 and max(len(work), len(passed_over)) < MOST_ROWS:
            turn = self._waiting.popleft()
            if self._cache.get(turn.name) is None:
                missing = turn.digests[self._cache.known(turn.digests) :]
                if missing and missing[0] in coming:
                    passed_over.append(turn)
                    continue
            if not self._enter(turn):
                if self._refuse_too_long(turn):
                    continue
                self._waiting.appendleft(turn)
                break
            if turn.prompt_images is not None and not self._encode(turn, turn.prompt_images):
                continue
            coming.update(turn.known_digests or ())
            self._feeding.append(turn)
            work.append((turn, turn.next_chunk(budget)))
            budget -= len(work[-1][1].tokens)
        self._waiting.extendleft(reversed(passed_over))
        return work

    def _enter(self, turn: RunningTurn) -> bool:
        """Give a turn a slot and pages for its prompt; False when there are too few pages now."""
        tokens, digests = turn.sequence(), self._slots.shared(turn, self._cache)
        # One page more for each that runs, so that those who enter are not the ones who must leave at once.
        held = self._cache.begin(turn.name, digests, -(-len(tokens) // PAGE), spare=self._slots.taken)
        if held is None:
            return False
        pages, fed = held
        self._slots.enter(turn, tokens, fed, pages)
        self.stats.reused_tokens += fed
        return True

    def _encode(self, turn: RunningTurn, prompt_images: PromptImages) -> bool:
        """Encode the images that are yet to be fed; a turn with one that cannot be read ends, and the others go on."""
        try:
            prompt_images.encode(turn.fed)
        except EngineError as error:
            self._end(turn, error)
            return False
        return True

    def _refuse_too_long(self, turn: RunningTurn) -> bool:
        """A sequence that does not fit even alone would wait forever."""
        length, room = len(turn.sequence()), self._pages * PAGE
        if length <= room:
            return False
        del self._turns[turn.name]
        error = EngineError(f"{turn.name!r} has {length} tokens, the cache has room for {room}: raise {KNOB}")
        self._ended.append((turn.request, error))
        return True

    def _prefill(self, work: list[tuple[RunningTurn, PromptChunk]]) -> None:
        self._slots.tell(self._steps)
        chunks = [chunk for _, chunk in work]
        slots = np.array([chunk.slot if chunk.last else -1 for chunk in chunks], dtype=np.int64)
        try:
            launched = self._steps.prefill(chunks, filtered=bool(self._slots.filtered[slots[slots >= 0]].any()))
        except torch.OutOfMemoryError as error:
            self._prefill_tokens = self._halved(sum(len(chunk.tokens) for chunk in chunks), "tokens of prompts", error)
            return
        for turn, chunk in work:
            turn.fed += len(chunk.tokens)
            self.stats.prefilled_tokens += len(chunk.tokens)
            if turn.known_digests:
                whole = min(turn.fed // PAGE, len(turn.known_digests))
                self._cache.share(turn.known_digests[:whole], self._slots.table[chunk.slot, :whole])
                self._slots.share_states(turn)
            if chunk.last:
                self._feeding.remove(turn)
                self._slots.decoding[chunk.slot] = True
        self.stats.peak_batch = max(self.stats.peak_batch, int(self._slots.decoding.sum()))
        slot_generation = np.where(slots >= 0, self._slots.slot_generation[slots], -1)
        self._in_flight.append(_Run(launched, slots, slot_generation))

    def _decode(self) -> None:
        slots, steps = self._reserve()
        self._slots.tell(self._steps)
        start = 0
        while start < len(slots):
            part = slots[start : start + self._most_rows]
            try:
                longest, filtered = self._slots.longest(part), bool(self._slots.filtered[part].any())
                launched = self._steps.decode(part.astype(np.int32), steps, longest, filtered=filtered)
            except torch.OutOfMemoryError as error:
                self._most_rows = self._halved(len(part), "rows of a decode run", error)
                continue
            self._in_flight.append(_Run(launched, part, self._slots.slot_generation[part]))
            start += len(part)
        self._slots.run_ahead(slots, steps)

    def _halved(self, count: int, what: str, error: torch.OutOfMemoryError) -> int:
        """Half of what the device had no memory for; nothing of it was computed."""
        if count <= 1:
            raise EngineError(f"the device has no memory left for one of the {what}: lower {KNOB}") from error
        self._say(f"out of memory with {count} {what}: going on with {count // 2} at a time (lower {KNOB})")
        self._steps.shrink()
        return count // 2

    def _reserve(self) -> tuple[Slots, int]:
        """Who decodes next and how many steps, with pages for all of it; where there are none, the last to come leave
        again."""
        while True:
            slots = self._slots.unfinished()
            steps = self._steps.steps_of(min(len(slots), self._most_rows))
            lacking = self._slots.lacking(slots, steps)
            pages = self._cache.take(int(lacking.sum()))
            if pages is not None:
                self._slots.extend(slots, lacking, pages)
                return slots, steps
            if self._in_flight:  # some may have ended
                self._read(self._in_flight.popleft())
            else:
                self._send_back()

    def _send_back(self) -> None:
        """The last turn to get a slot waits again, before all others; alone it cannot be helped."""
        running = self._slots.running()
        last = running[-1]
        if len(running) == 1:
            room = self._pages * PAGE
            error = EngineError(f"{last.name!r} has filled the cache of {room} tokens: raise {KNOB}")
            self._end(last, error)
            return
        self._stop(last)
        self._waiting.appendleft(last)
        self.stats.preempted += 1

    def _read(self, run: _Run) -> None:
        tokens, logprobs = run.launched.read(len(run.slots))
        # A turn that ended, or left, while this was under way has nothing here any more.
        mine = (run.slots >= 0) & (self._slots.slot_generation[run.slots] == run.slot_generation)
        count, ended = self._slots.accept(run.slots[mine], tokens[:, mine], logprobs[:, mine], self._decode_text)
        self.stats.decoded_tokens += count
        for turn, result in ended:
            self._end(turn, result)

    def _end(self, turn: RunningTurn, result: FinishReason | EngineError) -> None:
        del self._turns[turn.name]
        if isinstance(result, EngineError):
            self._cache.give(self._leave(turn))
            self._ended.append((turn.request, result))
            return
        kept = turn.request.keep_cache and self._slots.keep_states(turn, result)
        pages = self._leave(turn)
        if kept:
            sequence = turn.sequence()
            fed = len(sequence) - 1
            used = -(-fed // PAGE)
            self._cache.keep(turn.name, CachedConversation(sequence, fed, pages[:used], turn.request.media))
            pages = pages[used:]
        self._cache.give(pages)
        self._ended.append((turn.request, turn.completion(result)))

    def _leave(self, turn: RunningTurn) -> Pages:
        """Take a turn's slot from it; its pages are the caller's to give."""
        if turn in self._feeding:
            self._feeding.remove(turn)
        return self._slots.leave(turn)

    def _stop(self, turn: RunningTurn) -> None:
        self._cache.give(self._leave(turn))
        turn.request.stopped = time_budget.clock()

    def _stop_all(self) -> None:
        """Everybody waits again, in the order in which they came, and nothing that was computed is kept."""
        assert not self._in_flight, "settle comes first"
        running = self._slots.running()
        for turn in running:
            self._stop(turn)
        self._waiting.extendleft(reversed(running))
        self._cache.forget()
        self._slots.forget_states()
