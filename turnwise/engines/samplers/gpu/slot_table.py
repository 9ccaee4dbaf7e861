"""Who writes in which slot of the device, as the host knows it: pages, limits and tokens so far, all arrays by slot."""

import numpy as np
from numpy.typing import NDArray

from turnwise.engines.kernels.paged_attention import PAGE
from turnwise.engines.kernels.sampling import STOP_IDS
from turnwise.engines.samplers.gpu.paged_cache import PagedCache, Pages
from turnwise.engines.samplers.gpu.slots import empty_entry, no_entries, slot_entry, stops_of
from turnwise.engines.samplers.gpu.state_rows import StateRows
from turnwise.engines.samplers.gpu.steps import DeviceSteps
from turnwise.engines.samplers.gpu.turns import RunningTurn, WrittenTokens
from turnwise.engines.samplers.in_flight import DecodeText
from turnwise.errors import EngineError
from turnwise.system import time_budget
from turnwise.types import FinishReason

Slots = NDArray[np.int64]


class SlotTable:
    """The turn that owns each slot; what has changed is told to the device at once before the next launch."""

    def __init__(self, slots: int, max_pages: int, states: StateRows | None) -> None:
        self._states = states
        self.free = list(range(slots - 1, -1, -1))
        self.slot_generation = np.zeros(slots, dtype=np.int64)
        """How often a slot has changed hands."""
        self.decoding = np.zeros(slots, dtype=bool)
        self._limit = np.zeros(slots, dtype=np.int64)
        """Tokens that may be written in this slot."""
        self._ended_by_host = np.zeros(slots, dtype=bool)
        self.filtered = np.zeros(slots, dtype=bool)
        self._written = WrittenTokens(slots)
        self.table = np.zeros((slots, max_pages), dtype=np.int32)
        self._held = np.zeros(slots, dtype=np.int64)
        """Pages of each slot."""
        self._place = np.zeros(slots, dtype=np.int64)
        """Tokens that the device will have fed when all that is launched has run, if the turn goes on so long."""
        self._final = np.zeros(slots, dtype=np.int64)
        """Where the last token stands that may be written; that one is never fed."""
        self._stops = np.full((slots, STOP_IDS), -1, dtype=np.int32)
        self._owners: list[RunningTurn | None] = [None] * slots
        self._entered = 0
        self._entries: dict[int, NDArray[np.int32]] = {}
        self._cells: list[Slots] = []
        """What the device has not been told yet: entries of slots, and flat indices of the table."""

    @property
    def taken(self) -> int:
        """The number of slots that a turn is writing in."""
        return len(self._owners) - len(self.free)

    def _owner(self, slot: int) -> RunningTurn:
        """The turn that writes in this slot; RuntimeError when the slot is free."""
        turn = self._owners[slot]
        if turn is None:
            raise RuntimeError(f"nobody writes in slot {slot}")
        return turn

    def running(self) -> list[RunningTurn]:
        """All who have a slot, in the order in which they got it."""
        return sorted((turn for turn in self._owners if turn is not None), key=lambda turn: turn.order)

    def shared(self, turn: RunningTurn, cache: PagedCache) -> list[bytes]:
        """By which digests a turn may find pages: none where its conversation is kept. With recurrent layers pages and
        states are of no use without each other, and a prompt is shared as a whole."""
        states = self._states
        if states is not None and not states.has(turn.name):
            cache.drop(turn.name)
        if cache.get(turn.name) is not None:
            return []
        if states is not None:
            states.drop(turn.name)
        digests = turn.digests
        if states is None or (digests and states.has(digests[-1]) and cache.known(digests) == len(digests)):
            return digests
        return []

    def _begin_states(self, states: StateRows, turn: RunningTurn) -> None:
        if not turn.fed:
            states.begin(turn.slot)
        elif states.has(turn.name):
            states.resume(turn.name, turn.slot)
        else:
            states.fork(turn.digests[-1], turn.slot)

    def share_states(self, turn: RunningTurn) -> None:
        """Keep the states of a turn that has just been fed what its prompt shares with others."""
        if self._states is not None and 0 < turn.fed == turn.shared_end:
            self._states.keep(turn.digests[-1], turn.slot)

    def keep_states(self, turn: RunningTurn, result: FinishReason) -> bool:
        """Keep those of a turn that ended, before it leaves; False where the device has written beyond its end."""
        if self._states is None:
            return True
        if turn.ended_by_host and result is FinishReason.STOP:
            return False
        self._states.keep(turn.name, turn.slot)
        return True

    def forget_states(self) -> None:
        """What is kept is no longer true."""
        if self._states is not None:
            self._states.forget()

    def enter(self, turn: RunningTurn, tokens: NDArray[np.int64], fed: int, pages: Pages) -> None:
        """Give a turn a slot to be fed `tokens` in, of which `pages` hold the first `fed` already."""
        request, slot = turn.request, self.free.pop()
        now = time_budget.clock()
        if request.begun is None:
            request.begun = now
        elif request.stopped is not None:
            request.paused += now - request.stopped
            request.stopped = None
        self._entered += 1
        turn.slot, turn.order, turn.tokens, turn.fed = slot, self._entered, tokens, fed
        self._owners[slot] = turn
        if self._states is not None:
            self._begin_states(self._states, turn)
        limit = turn.limit - len(turn.ids)
        self._limit[slot], self._place[slot], self._final[slot] = limit, len(tokens), len(tokens) + limit - 1
        shift = 0 if turn.prompt_images is None else turn.prompt_images.shift
        entry = slot_entry(slot, int(tokens[-1]), len(tokens) - 1, limit, request.params, request.noise_bits, shift)
        self._entries[slot] = entry
        self._stops[slot] = stops_of(entry)
        self._ended_by_host[slot], self.filtered[slot] = turn.ended_by_host, turn.filtered
        self._held[slot] = len(pages)
        self.table[slot, : len(pages)] = pages
        first = slot * self.table.shape[1]
        self._cells.append(np.arange(first, first + len(pages)))

    def leave(self, turn: RunningTurn) -> Pages:
        """Take a turn's slot from it, with what it wrote there; returns its pages."""
        slot = turn.slot
        ids, logprobs = self._written.take(slot)
        if len(turn.ids):
            ids, logprobs = np.concatenate((turn.ids, ids)), np.concatenate((turn.logprobs, logprobs))
        turn.ids, turn.logprobs = ids, logprobs
        turn.slot = -1
        self._owners[slot] = None
        self.slot_generation[slot] += 1
        self.decoding[slot] = False
        self._entries[slot] = empty_entry(slot)  # the device may not know that the turn ended
        self.free.append(slot)
        return self.table[slot, : self._held[slot]].copy()

    def unfinished(self) -> Slots:
        """Slots with tokens left to write when all that is launched has run."""
        return np.flatnonzero(self.decoding & (self._place < self._final))

    def longest(self, slots: Slots) -> int:
        """Tokens of the longest sequence among these."""
        return int(self._place[slots].max())

    def lacking(self, slots: Slots, steps: int) -> Slots:
        """How many pages each needs for so many steps."""
        reached = np.minimum(self._place[slots] + steps, self._final[slots])
        needed: Slots = np.maximum(-(-reached // PAGE) - self._held[slots], 0)
        return needed

    def extend(self, slots: Slots, counts: Slots, pages: Pages) -> None:
        """Lay so many more pages for each of these slots."""
        if not len(pages):
            return
        owners = np.repeat(slots, counts)
        within = np.arange(len(pages)) - np.repeat(np.cumsum(counts) - counts, counts)
        columns = self._held[owners] + within
        self.table[owners, columns] = pages
        self._cells.append(owners * self.table.shape[1] + columns)
        self._held[slots] += counts

    def run_ahead(self, slots: Slots, steps: int) -> None:
        """So many more steps of these slots are launched."""
        self._place[slots] = np.minimum(self._place[slots] + steps, self._final[slots])

    def accept(
        self, slots: Slots, tokens: NDArray[np.int32], logprobs: NDArray[np.float32], decode_text: DecodeText
    ) -> tuple[int, list[tuple[RunningTurn, FinishReason | EngineError]]]:
        """Take what was written in these slots [steps, n], -1 where nothing was; how many tokens, and who ended why."""
        counts = np.count_nonzero(tokens >= 0, axis=0)
        bad = np.zeros(len(slots), dtype=bool)
        if not np.isfinite(logprobs.sum()):  # one look at all, since it is nearly always so
            bad = np.asarray(((tokens >= 0) & ~np.isfinite(logprobs)).any(axis=0))
            counts[bad] = 0
        # The device ends a turn at the first stop id it knows, so only the last token can be one; -1 is none.
        last = tokens[np.maximum(counts - 1, 0), np.arange(len(slots))]
        stopped = (last[:, None] == self._stops[slots]).any(axis=1) & (counts > 0)
        for column in np.flatnonzero(self._ended_by_host[slots] & ~bad).tolist():
            cut = self._owner(slots[column]).cut(tokens[: counts[column], column].tolist(), decode_text)
            if cut is not None:
                counts[column], stopped[column] = cut, True
        self._written.append(slots, counts, tokens, logprobs)
        full = self._written.count[slots] >= self._limit[slots]
        ended: list[tuple[RunningTurn, FinishReason | EngineError]] = []
        for column in np.flatnonzero(bad | stopped | full).tolist():
            turn = self._owner(slots[column])
            fed = len(turn.tokens) + int(self._written.count[turn.slot])
            result: FinishReason | EngineError = FinishReason.STOP if stopped[column] else FinishReason.LENGTH
            ended.append(
                (turn, EngineError(f"the model's logits are NaN after {fed} tokens") if bad[column] else result)
            )
        return int(counts.sum()), ended

    def tell(self, steps: DeviceSteps) -> None:
        """Slots, pages and states that have changed, to the device."""
        for moves in () if self._states is None else self._states.take_moves():
            steps.move_states(moves)
        if not self._entries and not self._cells:
            return
        entries = np.stack(list(self._entries.values())) if self._entries else no_entries()
        flat = np.unique(np.concatenate(self._cells)) if self._cells else np.zeros(0, dtype=np.int64)
        cells = np.stack((flat, self.table.reshape(-1)[flat]), axis=1).astype(np.int32)
        self._entries.clear()
        self._cells.clear()
        steps.update(entries, cells)
