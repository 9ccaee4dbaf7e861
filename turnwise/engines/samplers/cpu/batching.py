"""Continuous batching: requests join and leave the decode batch at any step, without changing anyone's tokens.

A request waits, is prefilled in a row of the active cache (what a cached turn or a shared prefix already holds is
copied instead), decodes one token a step with all others, and leaves; the last row then moves into the hole.
Synchronous and owned by one thread; `in_process.py` puts asyncio in front of it.
"""

import itertools
import math
from collections import deque

import numpy as np
from torch import Tensor

from turnwise.engines.model.attention import Chunk, Regime
from turnwise.engines.model.policy_model import PolicyModel
from turnwise.engines.samplers.cpu.steps import decode, prefill, up_to_shared
from turnwise.engines.samplers.in_flight import (
    DecodeText,
    Outcome,
    QueuedRequest,
    RunningRequest,
    SamplerStats,
    Writers,
    WrittenRows,
)
from turnwise.engines.samplers.kv_cache import ActiveRows, PrefixBlocks, SessionCache, SessionCaches, prompt_blocks
from turnwise.engines.samplers.prompt_images import PromptImages
from turnwise.engines.samplers.sampling import Rules, choose, uniforms
from turnwise.engines.weight_updates import FullWeights
from turnwise.errors import EngineError
from turnwise.system import time_budget
from turnwise.types import Completion, FinishReason

PREFILL_TOKENS = 2048
"""Most prompt tokens computed between two decode steps, so that running turns do not stall behind long prompts."""
ROOM_TO_WRITE = 128


class Batcher:
    """Rows 0 to n of the cache decode; a prompt too long for one step's budget is half done in row n."""

    def __init__(
        self,
        model: PolicyModel,
        decode_text: DecodeText,
        regime: Regime,
        max_batch: int,
        session_budget: int,
        prefix_budget: int,
    ) -> None:
        self.stats = SamplerStats()
        self.cached = SessionCaches(session_budget)
        self.prefixes = PrefixBlocks(prefix_budget)
        self.policy_version = 0
        self.asleep = False
        self._model = model
        self._decode_text = decode_text
        self._regime = regime
        self._max_batch = max_batch
        self._sharing = prefix_budget > 0
        self._rows = ActiveRows.of(model, max_batch)
        self._waiting: deque[QueuedRequest] = deque()
        self._active: list[RunningRequest] = []
        self._partial: RunningRequest | None = None
        self._busy: dict[str, QueuedRequest] = {}
        self._pausing: float | None = None
        """Since when everybody stands still: weights are being replaced, or the sampler sleeps."""
        self._written: WrittenRows | None = None
        """What the next decode step reads; None once others are active."""

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not (self._waiting or self._active or self._partial)

    @property
    def bytes(self) -> int:
        """Memory held for keys and values."""
        return self._rows.bytes + self.cached.bytes + self.prefixes.bytes

    @property
    def cached_bytes(self) -> int:
        """Memory held for conversations between turns."""
        return self.cached.bytes

    def submit(self, request: QueuedRequest) -> Completion | EngineError | None:
        """Queue a request; one that needs no work or cannot be served is answered at once."""
        name = request.conversation
        if name in self._busy:
            return EngineError(f"conversation {name!r} is still writing its last turn")
        cached = self.cached.get(name)
        if cached is not None and (error := request.departs_from(cached.token_ids, cached.media)):
            return error
        if self._limit(request) <= 0:
            return Completion.of((), (), FinishReason.LENGTH, version=self.policy_version)
        whole = bool(self._model.shape.states)
        request.blocks = prompt_blocks(request.token_ids, request.media, whole=whole) if self._sharing else []
        self._busy[name] = request
        self._waiting.append(request)
        return None

    def _limit(self, request: QueuedRequest) -> int:
        return min(request.params.max_tokens, self._model.shape.context_length - len(request.token_ids))

    def cancel(self, request: QueuedRequest) -> None:
        """Drop a request wherever it is; its row is free at once and nothing of its turn is kept."""
        if self._busy.get(request.conversation) is not request:
            # It ended while the caller gave up: the cache holds a turn nobody has seen.
            self.cached.drop(request.conversation)
            return
        del self._busy[request.conversation]
        if self._partial is not None and self._partial.request is request:
            if not self.asleep:
                self._rows.clear(len(self._active))  # nobody has seen its logits, they may be NaN
            self._partial = None
            return
        for row, running in enumerate(self._active):
            if running.request is request:
                self._leave(row)
                return
        self._waiting.remove(request)

    def release(self, conversation: str) -> None:
        """Forget a conversation; one still writing is forgotten when it ends."""
        self.cached.drop(conversation)
        if conversation in self._busy:
            self._busy[conversation].keep_cache = False

    def forget(self) -> None:
        """Drop every cache but those of turns under way."""
        self.cached.clear()
        self.prefixes.clear()

    def settle(self) -> list[Outcome]:
        """Every step ends before it returns: nothing is under way."""
        return []

    def publish(self, update: FullWeights, version: int) -> None:
        """Write with other weights from the next step on.

        Whatever the old ones computed is forgotten, and computed anew for turns that are being written: a token's
        logprob is then what its writer gives it after everything before it, never a mixture of two policies.
        """
        if self.asleep:  # computed anew when it wakes
            self._take_weights(update, version)
            return
        self._pausing = time_budget.clock()
        try:
            self._take_weights(update, version)
            self._recompute()
        finally:
            self._go_on()

    def sleep(self) -> None:
        """Hold no keys and values, not even those of turns under way, until `wake` computes these anew."""
        if self.asleep:
            return
        self._pausing = time_budget.clock()
        self.asleep = True
        self.forget()
        self._rows = ActiveRows.of(self._model, 0)

    def wake(self) -> None:
        """Go on from where everybody stood."""
        if not self.asleep:
            return
        self._rows = ActiveRows.of(self._model, self._max_batch)
        self._recompute()
        self.asleep = False
        self._go_on()

    def _go_on(self) -> None:
        if self._pausing is not None:
            seconds = time_budget.clock() - self._pausing
            for running in self._running():
                running.request.paused += seconds
        self._pausing = None  # last: a reader in between takes it for a longer wait, never for none

    def waited(self, request: QueuedRequest) -> float:
        """Seconds a request has waited for its row or stood still; any thread may ask."""
        now, since, begun = time_budget.clock(), self._pausing, request.begun
        if begun is None:
            return now - request.asked
        return begun - request.asked + request.paused + (0.0 if since is None else now - since)

    def _running(self) -> list[RunningRequest]:
        return self._active if self._partial is None else [*self._active, self._partial]

    def refuse(self, update: FullWeights) -> EngineError | None:
        """What is wrong with weights that are not this model's; nothing has changed then."""
        return update.refused_by(self._model.weight_shapes())

    def _take_weights(self, update: FullWeights, version: int) -> None:
        self._model.load(update.tensors)
        self.policy_version = version
        self.forget()
        for running in self._running():
            running.written_by(version)

    def _recompute(self) -> None:
        """The keys and values of turns under way, from their tokens."""
        everybody = self._running()
        if everybody:
            self._rows.reserve(len(everybody), max(running.fed for running in everybody) + 1)
        for row, running in enumerate(everybody):
            tokens, prompt_images = running.sequence(), running.prompt_images
            self._rows.begin(row)
            running.told = 0  # what chose experts before is forgotten with the keys and values it made
            for start in range(0, running.fed, PREFILL_TOKENS):
                chunk = Chunk(row, start, min(start + PREFILL_TOKENS, running.fed))
                prefill(
                    self._model, self._rows, [chunk], [tokens[chunk.start : chunk.end]], self._regime, [prompt_images]
                )
                self.stats.prefilled_tokens += chunk.length

    def close(self) -> None:
        """Forget everything; whoever still waits is told by others."""
        self.forget()
        self._rows = ActiveRows.of(self._model, 0)

    def step(self) -> list[Outcome]:
        """Prefill what waits, within the budget, then decode one token of every row; returns what ended."""
        outcomes: list[Outcome] = []
        budget = PREFILL_TOKENS
        while budget > 0 and (work := self._next_prefills(budget, outcomes)):
            budget -= sum(chunk.length for _, chunk in work)
            self._prefill(work, outcomes)
        if self._active:
            self._decode(outcomes)
        return outcomes

    def _next_prefills(self, budget: int, outcomes: list[Outcome]) -> list[tuple[RunningRequest, Chunk]]:
        """The next prompts in order of arrival. One whose next block is being computed for another in this very pass
        is passed over; it finds the block ready in the next pass, which comes before any decoding."""
        if not self._waiting and self._partial is None:
            return []
        self._make_room()
        work: list[tuple[RunningRequest, Chunk]] = []
        coming: set[bytes] = set()
        passed_over: list[QueuedRequest] = []
        if self._partial is not None:
            budget -= self._take(self._partial, budget, work)
            coming.update(block.digest for block in self._partial.request.blocks)
        while self._waiting and budget > 0 and len(self._active) + len(work) < self._max_batch:
            request = self._waiting.popleft()
            blocks = self.prefixes.known(request.blocks)
            missing = [block.digest for block in request.blocks[blocks:]]
            cached = self.cached.get(request.conversation)
            if cached is None and missing and missing[0] in coming:
                passed_over.append(request)
                continue
            try:
                known = request.blocks[blocks - 1].end if blocks else 0
                prompt_images = self._encode(request, known if cached is None else cached.span.length)
            except EngineError as error:  # of one image: the others go on
                del self._busy[request.conversation]
                outcomes.append((request, error))
                continue
            coming.update(missing)
            row = len(self._active) + len(work)
            self._rows.reserve(row + 1, len(request.token_ids))  # who comes for one passed over may be longer
            running = self._enter(request, row, cached, blocks, prompt_images)
            budget -= self._take(running, budget, work)
        self._waiting.extendleft(reversed(passed_over))
        return work

    def _make_room(self) -> None:
        """Rows for those that may enter now and capacity to write in, all at once: growing copies everything."""
        used = len(self._active) + (self._partial is not None)
        entering = list(itertools.islice(self._waiting, self._max_batch - used))
        if entering:
            longest = max(len(r.token_ids) + min(self._limit(r), ROOM_TO_WRITE) for r in entering)
            self._rows.reserve(used + len(entering), longest)

    def _take(self, running: RunningRequest, budget: int, work: list[tuple[RunningRequest, Chunk]]) -> int:
        end = min(running.prompt_length, running.fed + budget)
        work.append((running, Chunk(len(self._active) + len(work), running.fed, end)))
        return end - running.fed

    def _encode(self, request: QueuedRequest, fed: int) -> PromptImages | None:
        """The images of a request, those behind its first `fed` tokens encoded."""
        prompt_images = PromptImages(self._model, request.token_ids, request.media) if request.media else None
        if prompt_images is not None:
            prompt_images.encode(fed)
        return prompt_images

    def _enter(
        self,
        request: QueuedRequest,
        row: int,
        cached: SessionCache | None,
        blocks: int,
        prompt_images: PromptImages | None,
    ) -> RunningRequest:
        """Give a request its row and copy into it what has been computed before."""
        request.begun = time_budget.clock()
        self._rows.begin(row)
        if cached is not None:
            stretches = [cached.span]
            self.cached.drop(request.conversation)
        else:
            stretches = self.prefixes.take(request.blocks[:blocks])
        fed = 0
        for span in stretches:
            self._rows.write(row, fed, span)
            fed += span.length
        self.stats.reused_tokens += fed
        writers = Writers(self.policy_version)
        return RunningRequest(request, self._limit(request), fed, cached is None, writers, prompt_images=prompt_images)

    def _feed(self, work: list[tuple[RunningRequest, Chunk]]) -> Tensor:
        tokens = [running.request.token_ids[chunk.start : chunk.end] for running, chunk in work]
        all_prompt_images = [running.prompt_images for running, _ in work]
        logits = prefill(self._model, self._rows, [chunk for _, chunk in work], tokens, self._regime, all_prompt_images)
        self.stats.prefilled_tokens += sum(map(len, tokens))
        for running, chunk in work:
            running.fed = chunk.end
        return logits

    def _prefill(self, work: list[tuple[RunningRequest, Chunk]], outcomes: list[Outcome]) -> None:
        if self._rows.states and (cut := up_to_shared(work)):
            self._share([(running, chunk.row) for running, chunk in cut], self._feed(cut)[:, 0])
            work = [(running, Chunk(chunk.row, running.fed, chunk.end)) for running, chunk in work]
        logits = self._feed(work)
        last = work[-1][0]  # only the last can be cut short by the budget
        self._partial = last if last.fed < last.prompt_length else None
        first = len(self._active)
        ready = [running for running, _ in work if running is not self._partial]
        if not ready:
            return
        self._active.extend(ready)
        self._written = None
        self.stats.peak_batch = max(self.stats.peak_batch, len(self._active))
        rules = Rules.of([running.request.params for running in ready])
        bits = np.array([running.request.noise_bits for running in ready], dtype=np.uint64)
        places = np.array([running.prompt_length for running in ready], dtype=np.int64)
        ids, logprobs = choose(logits[: len(ready)], rules, uniforms(bits, places))
        self._share([(running, row) for row, running in enumerate(ready, start=first)], logprobs)
        self._accept(first, ids, logprobs, outcomes)

    def _share(self, fed: list[tuple[RunningRequest, int]], numbers: Tensor) -> None:
        """Keep the blocks of prompts, with their rows, for those that begin alike; not where a number is NaN."""
        for (running, row), number in zip(fed, numbers.tolist(), strict=True):
            # The head of a chain last: the oldest block is evicted first, and a tail without its head is useless.
            for block in reversed(running.request.blocks if running.shareable and math.isfinite(number) else ()):
                if block.digest not in self.prefixes and (not self._rows.states or running.fed == block.end):
                    self.prefixes.put(block.digest, self._rows.read(row, block.start, block.end))

    def _decode(self, outcomes: list[Outcome]) -> None:
        rows = self._written = self._written or WrittenRows.of(self._active)
        self._rows.reserve(len(self._active), int(rows.places.max()) + 1)
        logits = decode(self._model, self._rows, rows.tokens, rows.places, self._regime, rows.shifts)
        rows.places = rows.places + 1
        ids, logprobs = choose(logits, rows.rules, uniforms(rows.noise_bits, rows.places))
        rows.tokens = ids.numpy()
        for running in self._active:
            running.fed += 1
        self._accept(0, ids, logprobs, outcomes)

    def _accept(self, first: int, ids: Tensor, logprobs: Tensor, outcomes: list[Outcome]) -> None:
        """Append one token to each row from `first` on, and let those that ended leave."""
        ended: list[tuple[int, Completion | EngineError]] = []
        rows = zip(self._active[first:], ids.tolist(), logprobs.tolist(), strict=True)
        for row, (running, token, logprob) in enumerate(rows, start=first):
            if not math.isfinite(logprob):
                self._rows.clear(row)
                ended.append((row, EngineError(f"the model's logits are NaN after {running.fed} tokens")))
                continue
            running.ids.append(token)
            running.logprobs.append(logprob)
            self.stats.decoded_tokens += 1
            stops = running.stops(token, self._decode_text)
            if stops or len(running.ids) == running.limit:
                reason = FinishReason.STOP if stops else FinishReason.LENGTH
                experts = self._rows.chosen(row, running.told, running.fed)
                ended.append((row, running.completion(reason, experts)))
        for row, result in reversed(ended):  # from the end, so that rows still to leave do not move
            running = self._active[row]
            outcomes.append((running.request, result))
            del self._busy[running.request.conversation]
            if running.request.keep_cache and isinstance(result, Completion):
                span = self._rows.read(row, 0, running.fed)
                session = SessionCache(running.sequence(), span, running.request.media)
                self.cached.put(running.request.conversation, session)
            self._leave(row)

    def _leave(self, row: int) -> None:
        """Free a row; the last decoding row moves into the hole and a half-done prompt behind it."""
        last = len(self._active) - 1
        if row != last:
            if not self.asleep:
                self._rows.move(last, row, self._active[last].fed)
            self._active[row] = self._active[last]
        self._active.pop()
        if self._partial is not None and not self.asleep:
            self._rows.move(last + 1, last, self._partial.fed)
        self._written = None
