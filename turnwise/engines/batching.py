"""Continuous batching: requests join and leave the decode batch at any step, without changing anyone's tokens.

A request waits, is prefilled in a row of the active cache (what a cached turn or a shared prefix already holds is
copied instead), decodes one token a step with all others, and leaves; the last row then moves into the hole.
Synchronous and owned by one thread; `torch_sampler.py` puts asyncio in front of it.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from turnwise import time_budget
from turnwise.engines.attention import Chunk, Regime
from turnwise.engines.decoder import Decoder
from turnwise.engines.kv_cache import PREFIX_BLOCK, ActiveRows, PrefixBlocks, SessionCache, SessionCaches, block_hashes
from turnwise.engines.sampler import SamplingParams
from turnwise.engines.sampling import Rules, choose, uniforms
from turnwise.engines.steps import decode, prefill
from turnwise.errors import EngineError
from turnwise.types import Completion, FinishReason

PREFILL_TOKENS = 2048
"""Most prompt tokens computed between two decode steps, so that running turns do not stall behind long prompts."""
ROOM_TO_WRITE = 128

DecodeText = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class SamplerStats:
    """What a sampler has done so far."""

    steps: int = 0
    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    reused_tokens: int = 0
    peak_batch: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """One turn to write: the whole sequence so far, how to draw, and the bits its noise comes from."""

    conversation: str
    token_ids: NDArray[np.int64]
    params: SamplingParams
    noise_bits: int
    digests: list[bytes] = field(init=False)
    """Of the prompt's whole blocks; written by `Batcher.submit`."""
    keep_cache: bool = True
    """Whether its cache is kept for another turn; `Batcher.release` says no."""
    asked: float = field(default_factory=lambda: time_budget.clock())
    begun: float | None = None
    """When it got its row; written by `Batcher`, as is:"""
    paused: float = 0.0
    """Seconds it stood still since then while weights were replaced."""


Outcome = tuple[Request, Completion | EngineError]


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request that has a row; `fed` counts the tokens whose keys and values the row holds."""

    request: Request
    limit: int
    fed: int
    shareable: bool
    policy_version: int
    """Of the first token; the oldest when weights change in the middle of a turn."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    """The last tokens, long enough to hold any stop string."""

    @property
    def prompt_length(self) -> int:
        return len(self.request.token_ids)


class Batcher:
    """Rows 0 to n of the cache decode; a prompt too long for one step's budget is half done in row n."""

    def __init__(
        self,
        decoder: Decoder,
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
        self._decoder = decoder
        self._decode_text = decode_text
        self._regime = regime
        self._max_batch = max_batch
        self._sharing = prefix_budget > 0
        self._rows = ActiveRows(decoder.config, decoder.dtype, max_batch)
        self._waiting: deque[Request] = deque()
        self._lanes: list[RunningRequest] = []
        self._partial: RunningRequest | None = None
        self._busy: dict[str, Request] = {}
        self._pausing: float | None = None
        """Since when everybody stands still because weights are being replaced."""
        self._stale = True
        """Whether the arrays below still describe the lanes."""
        self._tokens = np.zeros(0, dtype=np.int64)
        self._places = np.zeros(0, dtype=np.int64)
        self._noise_bits = np.zeros(0, dtype=np.uint64)
        self._rules = Rules.of([])

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not (self._waiting or self._lanes or self._partial)

    def submit(self, request: Request) -> Completion | EngineError | None:
        """Queue a request; one that needs no work or cannot be served is answered at once."""
        name = request.conversation
        if name in self._busy:
            return EngineError(f"conversation {name!r} is still writing its last turn")
        cached = self.cached.get(name)
        if cached is not None and not np.array_equal(cached.token_ids, request.token_ids[: len(cached.token_ids)]):
            return EngineError(
                f"conversation {name!r} changed its past: it must start with the {len(cached.token_ids)} tokens so far"
            )
        if self._limit(request) <= 0:
            return Completion((), (), FinishReason.LENGTH, self.policy_version)
        request.digests = block_hashes(request.token_ids) if self._sharing else []
        self._busy[name] = request
        self._waiting.append(request)
        return None

    def _limit(self, request: Request) -> int:
        return min(request.params.max_tokens, self._decoder.config.context_length - len(request.token_ids))

    def cancel(self, request: Request) -> None:
        """Drop a request wherever it is; its row is free at once and nothing of its turn is kept."""
        if self._busy.get(request.conversation) is not request:
            # It ended while the caller gave up: the cache holds a turn nobody has seen.
            self.cached.drop(request.conversation)
            return
        del self._busy[request.conversation]
        if self._partial is not None and self._partial.request is request:
            self._rows.clear(len(self._lanes))  # nobody has seen its logits, they may be NaN
            self._partial = None
            return
        for row, lane in enumerate(self._lanes):
            if lane.request is request:
                self._leave(row)
                return
        self._waiting.remove(request)

    def release(self, conversation: str) -> None:
        """Forget a conversation; one still writing is forgotten when it ends."""
        self.cached.drop(conversation)
        if conversation in self._busy:
            self._busy[conversation].keep_cache = False

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Write with other weights from the next step on.

        Whatever the old ones computed is forgotten, and computed anew for turns that are being written: a token's
        logprob is then what its writer gives it after everything before it, never a mixture of two policies.
        """
        self._pausing = time_budget.clock()
        try:
            self._publish(tensors, version)
        finally:
            seconds = time_budget.clock() - self._pausing
            for lane in self._running():
                lane.request.paused += seconds
            self._pausing = None  # last: a reader in between takes it for a longer wait, never for none

    def waited(self, request: Request) -> float:
        """Seconds a request has waited for its row or stood still; any thread may ask."""
        now, since, begun = time_budget.clock(), self._pausing, request.begun
        if begun is None:
            return now - request.asked
        return begun - request.asked + request.paused + (0.0 if since is None else now - since)

    def _running(self) -> list[RunningRequest]:
        return self._lanes if self._partial is None else [*self._lanes, self._partial]

    def _publish(self, tensors: Mapping[str, Tensor], version: int) -> None:
        self._decoder.replace_tensors(tensors)
        self.policy_version = version
        self.cached.clear()
        self.prefixes.clear()
        for row, lane in enumerate(self._running()):
            if not lane.ids:
                lane.policy_version = version
            tokens = np.concatenate((lane.request.token_ids, np.array(lane.ids, dtype=np.int64)))
            for start in range(0, lane.fed, PREFILL_TOKENS):
                chunk = Chunk(row, start, min(start + PREFILL_TOKENS, lane.fed))
                prefill(self._decoder, self._rows, [chunk], [tokens[chunk.start : chunk.end]], self._regime)
                self.stats.prefilled_tokens += chunk.length

    def step(self) -> list[Outcome]:
        """Prefill what waits, within the budget, then decode one token of every row; returns what ended."""
        outcomes: list[Outcome] = []
        budget = PREFILL_TOKENS
        while budget > 0 and (work := self._next_prefills(budget)):
            budget -= sum(chunk.length for _, chunk in work)
            self._prefill(work, outcomes)
        if self._lanes:
            self._decode(outcomes)
        return outcomes

    def _next_prefills(self, budget: int) -> list[tuple[RunningRequest, Chunk]]:
        """The next prompts in order of arrival. One whose next block is being computed for another in this very pass
        is passed over; it finds the block ready in the next pass, which comes before any decoding."""
        if not self._waiting and self._partial is None:
            return []
        self._make_room()
        work: list[tuple[RunningRequest, Chunk]] = []
        coming: set[bytes] = set()
        passed_over: list[Request] = []
        if self._partial is not None:
            budget -= self._take(self._partial, budget, work)
            coming.update(self._partial.request.digests)
        while self._waiting and budget > 0 and len(self._lanes) + len(work) < self._max_batch:
            request = self._waiting.popleft()
            known = self.prefixes.known(request.digests)
            missing = request.digests[known:]
            cached = self.cached.get(request.conversation)
            if cached is None and missing and missing[0] in coming:
                passed_over.append(request)
                continue
            coming.update(missing)
            lane = self._enter(request, len(self._lanes) + len(work), cached, known)
            budget -= self._take(lane, budget, work)
        self._waiting.extendleft(reversed(passed_over))
        return work

    def _make_room(self) -> None:
        """Rows for those that may enter now and capacity to write in, all at once: growing copies everything."""
        taken = len(self._lanes) + (self._partial is not None)
        entering = list(itertools.islice(self._waiting, self._max_batch - taken))
        if entering:
            longest = max(len(r.token_ids) + min(self._limit(r), ROOM_TO_WRITE) for r in entering)
            self._rows.reserve(taken + len(entering), longest)

    def _take(self, lane: RunningRequest, budget: int, work: list[tuple[RunningRequest, Chunk]]) -> int:
        end = min(lane.prompt_length, lane.fed + budget)
        work.append((lane, Chunk(len(self._lanes) + len(work), lane.fed, end)))
        return end - lane.fed

    def _enter(self, request: Request, row: int, cached: SessionCache | None, known: int) -> RunningRequest:
        """Give a request its row and copy into it what has been computed before."""
        request.begun = time_budget.clock()
        if cached is not None:
            stretches = [cached.span]
            self.cached.drop(request.conversation)
        else:
            stretches = self.prefixes.take(request.digests[:known])
        fed = 0
        for span in stretches:
            self._rows.write(row, fed, span)
            fed += span.length
        self.stats.reused_tokens += fed
        return RunningRequest(request, self._limit(request), fed, cached is None, self.policy_version)

    def _prefill(self, work: list[tuple[RunningRequest, Chunk]], outcomes: list[Outcome]) -> None:
        tokens = [lane.request.token_ids[chunk.start : chunk.end] for lane, chunk in work]
        logits = prefill(self._decoder, self._rows, [chunk for _, chunk in work], tokens, self._regime)
        self.stats.prefilled_tokens += sum(map(len, tokens))
        for lane, chunk in work:
            lane.fed = chunk.end
        last = work[-1][0]  # only the last can be cut short by the budget
        self._partial = last if last.fed < last.prompt_length else None
        first = len(self._lanes)
        ready = [lane for lane, _ in work if lane is not self._partial]
        if not ready:
            return
        self._lanes.extend(ready)
        self._stale = True
        self.stats.peak_batch = max(self.stats.peak_batch, len(self._lanes))
        rules = Rules.of([lane.request.params for lane in ready])
        bits = np.array([lane.request.noise_bits for lane in ready], dtype=np.uint64)
        places = np.array([lane.prompt_length for lane in ready], dtype=np.int64)
        ids, logprobs = choose(logits[: len(ready)], rules, uniforms(bits, places))
        self._share(first, ready, logprobs)
        self._accept(first, ids, logprobs, outcomes)

    def _share(self, first: int, ready: list[RunningRequest], logprobs: Tensor) -> None:
        """Keep the whole blocks of new prompts for those that begin alike."""
        for row, (lane, logprob) in enumerate(zip(ready, logprobs.tolist(), strict=True), start=first):
            if not lane.shareable or not math.isfinite(logprob):
                continue
            # The head of a chain last: the oldest block is evicted first, and a tail without its head is useless.
            for index, digest in reversed(list(enumerate(lane.request.digests))):
                if digest not in self.prefixes:
                    start = index * PREFIX_BLOCK
                    self.prefixes.put(digest, self._rows.read(row, start, start + PREFIX_BLOCK))

    def _decode(self, outcomes: list[Outcome]) -> None:
        if self._stale:
            self._tokens = np.array([lane.ids[-1] for lane in self._lanes], dtype=np.int64)
            self._places = np.array([lane.fed for lane in self._lanes], dtype=np.int64)
            self._noise_bits = np.array([lane.request.noise_bits for lane in self._lanes], dtype=np.uint64)
            self._rules = Rules.of([lane.request.params for lane in self._lanes])
            self._stale = False
        self._rows.reserve(len(self._lanes), int(self._places.max()) + 1)
        logits = decode(self._decoder, self._rows, self._tokens, self._places, self._regime)
        self._places = self._places + 1
        ids, logprobs = choose(logits, self._rules, uniforms(self._noise_bits, self._places))
        self._tokens = ids.numpy()
        for lane in self._lanes:
            lane.fed += 1
        self.stats.steps += 1
        self._accept(0, ids, logprobs, outcomes)

    def _accept(self, first: int, ids: Tensor, logprobs: Tensor, outcomes: list[Outcome]) -> None:
        """Append one token to each row from `first` on, and let those that ended leave."""
        ended: list[tuple[int, Completion | EngineError]] = []
        rows = zip(self._lanes[first:], ids.tolist(), logprobs.tolist(), strict=True)
        for row, (lane, token, logprob) in enumerate(rows, start=first):
            if not math.isfinite(logprob):
                self._rows.clear(row)
                ended.append((row, EngineError(f"the model's logits are NaN after {lane.fed} tokens")))
                continue
            lane.ids.append(token)
            lane.logprobs.append(logprob)
            self.stats.decoded_tokens += 1
            if token in lane.request.params.stop_ids or self._stop_string(lane, token):
                ended.append((row, self._completion(lane, FinishReason.STOP)))
            elif len(lane.ids) == lane.limit:
                ended.append((row, self._completion(lane, FinishReason.LENGTH)))
        for row, result in reversed(ended):  # from the end, so that rows still to leave do not move
            lane = self._lanes[row]
            outcomes.append((lane.request, result))
            del self._busy[lane.request.conversation]
            if lane.request.keep_cache and isinstance(result, Completion):
                written = np.concatenate((lane.request.token_ids, np.array(lane.ids, dtype=np.int64)))
                self.cached.put(lane.request.conversation, SessionCache(written, self._rows.read(row, 0, lane.fed)))
            self._leave(row)

    def _completion(self, lane: RunningRequest, reason: FinishReason) -> Completion:
        return Completion(tuple(lane.ids), tuple(lane.logprobs), reason, lane.policy_version)

    def _stop_string(self, lane: RunningRequest, token: int) -> bool:
        """Whether the text so far holds a stop string. Only a tail is decoded anew each time: what came before it was
        searched already, and it always spans more characters than the longest stop string."""
        stops = lane.request.params.stop_strings
        if not stops:
            return False
        lane.tail.append(token)
        text = self._decode_text(lane.tail)
        longest = max(map(len, stops))
        if len(text) > 4 * longest + 64:
            half = lane.tail[len(lane.tail) // 2 :]
            if len(self._decode_text(half)) > longest + 16:  # 16: characters cut in two at the edge
                lane.tail = half
        return any(stop in text for stop in stops)

    def _leave(self, row: int) -> None:
        """Free a row; the last decoding row moves into the hole and a half-done prompt behind it."""
        last = len(self._lanes) - 1
        if row != last:
            self._rows.move(last, row, self._lanes[last].fed)
            self._lanes[row] = self._lanes[last]
        self._lanes.pop()
        if self._partial is not None:
            self._rows.move(last + 1, last, self._partial.fed)
        self._stale = True
