"""The sampler's passes on a device: updates of slots, chunks of prompts, and runs of several decode steps.

Each is a function of fixed shape over tensors that stay where they are, so that it can be captured as a CUDA graph;
numbers go up in one copy, tokens and log-probs come down behind an event. Nothing here waits for the device but
`Launched.read`. On the CPU the same functions run as they stand.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from turnwise.engines.device_clock import DeviceClock
from turnwise.engines.kernels.paged_attention import PAGE, QueryBlocks, paged_attention, write_pages
from turnwise.engines.kernels.rows import Rotation, rotate_into_pages
from turnwise.engines.kernels.sampling import advance, choose
from turnwise.engines.model.attention import sent
from turnwise.engines.model.policy_model import ImageFeatures, LayerCache, Mixing, ModelInputs, PolicyModel
from turnwise.engines.model.recurrence import Recurrence, States, empty_states
from turnwise.engines.samplers.gpu.graphs import Graphs, Say
from turnwise.engines.samplers.gpu.pass_shapes import (
    Numbers,
    PromptChunk,
    block_count,
    decode_bucket,
    decode_sizes,
    empty_pass,
    packed_chunks,
    pass_bucket,
    pass_rows,
    pass_sizes,
)
from turnwise.engines.samplers.gpu.slots import ENTRY, SlotState, empty_entry
from turnwise.engines.samplers.gpu.state_rows import Moves, StateRows
from turnwise.engines.samplers.gpu.transfers import DeviceOutput, Launched, Transfers
from turnwise.engines.samplers.prompt_images import image_inputs
from turnwise.errors import EngineError

UPDATE_SIZES = (16, 128, 1024, 8192)
"""Slot entries of one update; it lays four times as many pages."""
PAGES_PER_ENTRY = 4
MANY_ROWS = 1024
FEW_PROGRAMS, LONG, SPLITS = 64, 1024, 8
"""Few sequences, of which one is long, leave most of a GPU idle unless several programs share the keys of a query."""


@dataclass(frozen=True, slots=True)
class PagePool:
    """Keys [pages, Hkv, PAGE, D] and values [pages, Hkv, PAGE, Dv] of every layer, under the same page numbers."""

    layers: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype, caches: Sequence[LayerCache], pages: int) -> "PagePool":
        """Zeros: what lies beyond a sequence is never NaN before somebody computed it."""

        def zeros(cache: LayerCache, dim: int) -> Tensor:
            return torch.zeros(pages, cache.kv_heads, PAGE, dim, dtype=dtype, device=device)

        return cls(tuple((zeros(cache, cache.key_dim), zeros(cache, cache.value_dim)) for cache in caches))

    @property
    def bytes(self) -> int:
        """The memory that the pages of all layers take, in bytes."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)


def page_bytes(caches: Sequence[LayerCache], dtype: torch.dtype) -> int:
    """What one page takes in all layers together."""
    return sum(cache.kv_heads * (cache.key_dim + cache.value_dim) for cache in caches) * PAGE * dtype.itemsize


@dataclass(frozen=True, slots=True)
class PagedAttend:
    """Attention of a pass over the pages of its sequences, which it writes first (a FusedAttend)."""

    pool: PagePool
    table: Tensor
    slots: Tensor
    """[T] int32, -1 for rows that belong to nobody."""
    places: Tensor
    blocks: QueryBlocks
    splits: int = 1

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mixing: Mixing, /) -> Tensor:
        keys, values = self.pool.layers[layer]
        write_pages(keys, values, k, v, self.table, self.slots, self.places)
        return paged_attention(
            q,
            keys,
            values,
            self.table,
            self.blocks,
            scale=q.shape[-1] ** -0.5 if mixing.scale is None else mixing.scale,
            window=mixing.window,
            softcap=mixing.softcap,
            sinks=mixing.sinks,
            splits=self.splits,
        )

    def rotated(self, layer: int, fused: Tensor, rotation: Rotation) -> Tensor:
        """Rotation, pages and attention of a plain layer."""
        keys, values = self.pool.layers[layer]
        q = rotate_into_pages(fused, rotation, keys, values, self.table, self.slots)
        scale = rotation.head_dim**-0.5
        return paged_attention(q, keys, values, self.table, self.blocks, scale=scale, splits=self.splits)


class DeviceSteps:
    """All that is computed for a sampler on its device: model, slots, pages and graphs."""

    def __init__(
        self,
        model: PolicyModel,
        device: torch.device,
        *,
        slots: int,
        steps: int,
        block: int,
        invariant: bool,
        smallest_pass: int,
        clock: DeviceClock | None,
        say: Say,
        state_rows: StateRows | None = None,
    ) -> None:
        """At most `steps` tokens are decoded in one run; `block` queries of a prompt are mixed together; `state_rows`
        are given for a model with recurrent layers."""
        self.state_rows = state_rows
        self._most_steps, self.block, self.smallest_pass = steps, block, smallest_pass
        self.max_pages = -(-model.shape.context_length // PAGE)
        self.dtype = next(model.parameters()).dtype
        self._model, self._device, self._slots = model, device, slots
        self._clock, self._invariant = clock, invariant
        self._pool: PagePool | None = None
        self._states: list[States] = []
        """Of each recurrent layer [rows, ...], see `StateRows`."""
        self._state = SlotState.on(device, slots, self.max_pages)
        self._graphs = Graphs(device, say, off=model.shape.no_graphs)
        self._transfers = Transfers(device)
        self._outputs: dict[tuple[object, ...], DeviceOutput] = {}
        model.prepare(model.shape.context_length)

    @property
    def bytes(self) -> int:
        """Memory held for keys, values and states."""
        states = sum(state.nbytes for layer in self._states for state in layer)
        return states + (0 if self._pool is None else self._pool.bytes)

    def allocate(self, pages: int) -> None:
        """Make the pool; raises torch.OutOfMemoryError when there is not room for it."""
        if self.state_rows is not None:
            self._states = empty_states(self._model.shape.states, self.state_rows.rows, self._device)
        self._pool = PagePool.on(self._device, self.dtype, self._model.shape.caches, pages)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # another stream may use it first

    def free(self) -> None:
        """Give back the pool, the graphs and all buffers, when all that was launched has run."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._graphs.clear()
        self._transfers.clear()
        self._outputs.clear()
        self._pool, self._states = None, []
        self.shrink()

    def shrink(self) -> None:
        """Give memory back that nobody uses now."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take new weights, which another stream may just have written and may change when this returns."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._model.load(weights)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def warm_up(self, prefill_tokens: int) -> int:
        """Run and capture every shape that passes of unfiltered turns take, with rows that are nobody's: a shape met in
        the middle of the work would cost as much as a hundred runs. How many."""
        # Passes over prompts of a model with recurrent layers have the shapes of their chunks.
        passes = [] if self._states else pass_sizes(prefill_tokens, self.smallest_pass)
        sizes = decode_sizes(self._slots)
        for _ in range(2):  # the first run compiles, the second is captured
            for count in UPDATE_SIZES[:-1]:
                self.update(np.tile(empty_entry(self._state.padding), (count, 1)), np.zeros((0, 2), dtype=np.int32))
            for tokens in passes:
                self._prefill(tokens, empty_pass(tokens, pass_rows(tokens), self.block), filtered=False)
            for size in sizes:
                self.decode(np.full(size, -1, dtype=np.int32), self.steps_of(size), 1, filtered=False)
        return len(passes) + len(sizes)

    def update(self, entries: Numbers, cells: Numbers) -> None:
        """Slot entries [n, ENTRY] and (flat index, page) pairs of the table, each naming a place once."""
        most = UPDATE_SIZES[-1]
        for start in range(0, max(len(entries), -(-len(cells) // PAGES_PER_ENTRY)), most):
            part = entries[start : start + most]
            laid = cells[start * PAGES_PER_ENTRY : (start + most) * PAGES_PER_ENTRY]
            needed = max(len(part), -(-len(laid) // PAGES_PER_ENTRY))
            size = next(size for size in UPDATE_SIZES if size >= needed)
            pairs = size * PAGES_PER_ENTRY
            numbers = np.zeros(size * ENTRY + 2 * pairs, dtype=np.int32)
            by_slot, by_cell = numbers[: size * ENTRY].reshape(size, ENTRY), numbers[size * ENTRY :].reshape(pairs, 2)
            by_slot[:, 0] = self._state.padding
            by_slot[: len(part)] = part
            by_cell[:, 0] = self._state.padding * self.max_pages
            by_cell[: len(laid)] = laid
            buffer = self._transfers.up(("update", size), numbers)

            def work(buffer: Tensor = buffer, size: int = size, pairs: int = pairs) -> None:
                self._state.enter(buffer[: size * ENTRY].view(size, ENTRY))
                self._state.lay(buffer[size * ENTRY :].view(pairs, 2))

            self._graphs.run(("update", size), work)

    def prefill(self, chunks: Sequence[PromptChunk], *, filtered: bool) -> Launched:
        """Feed chunks of prompts; where a prompt ends, its slot gets the first token behind it: one line of tokens."""
        tokens = pass_bucket(sum(len(chunk.tokens) for chunk in chunks), len(chunks), self.smallest_pass)
        numbers = packed_chunks(chunks, tokens, pass_rows(tokens), self.block)
        recurrence = self._recurrence(chunks)
        if not any(chunk.prompt_images for chunk in chunks):
            return self._prefill(tokens, numbers, filtered=filtered, recurrence=recurrence)
        places, images = image_inputs([(chunk.start, chunk.end, chunk.prompt_images) for chunk in chunks], self._device)
        padded = functional.pad(places, (0, tokens - places.shape[-1]))
        placed = padded.to(self._device)
        return self._prefill(tokens, numbers, filtered=filtered, placed=placed, images=images, recurrence=recurrence)

    def _recurrence(self, chunks: Sequence[PromptChunk]) -> Recurrence | None:
        if not self._states:
            return None
        slots = torch.tensor([chunk.slot for chunk in chunks])
        return Recurrence(tuple(len(chunk.tokens) for chunk in chunks), self._states, sent(slots, self._device))

    def move_states(self, moves: Moves) -> None:
        """Copy the states of some rows into others."""
        sources, targets = sent(torch.from_numpy(moves), self._device)
        for state in (state for layer in self._states for state in layer):
            state.index_copy_(0, targets, state.index_select(0, sources))

    def _prefill(
        self,
        tokens: int,
        numbers: Numbers,
        *,
        filtered: bool,
        placed: Tensor | None = None,
        images: ImageFeatures | None = None,
        recurrence: Recurrence | None = None,
    ) -> Launched:
        """A pass of this size; with positions and features of its own (`placed`) or states it is run as it stands."""
        key, rows = ("prefill", tokens, filtered), pass_rows(tokens)
        buffer = self._transfers.up(key, numbers)
        output = self._output(key, 1, rows)
        blocks = block_count(tokens, rows, self.block)
        sizes = [tokens] * 3 + [blocks] * 4 + [rows] * 2

        def work() -> None:
            ids, places, slots, first, count, slot, position, wanted, last = torch.split(buffer, sizes)
            attend = PagedAttend(
                self._pages, self._state.table, slots, places, QueryBlocks(first, count, slot, position, self.block)
            )
            positions = places.long() if placed is None else placed
            hidden = self._model(ModelInputs(ids.long(), positions, images, recurrence), attend, rows=last.long())
            output.step.zero_()
            self._draw(hidden, wanted, self._drawing(wanted, filtered), output)

        return self._launch(key if placed is None and recurrence is None else None, work, output)

    def steps_of(self, rows: int) -> int:
        """How many tokens to write in one run of so many rows: a step of many takes long enough to hide the host's
        work in fewer of them, and a turn that ends waits less for the next."""
        return self._most_steps if rows <= MANY_ROWS else max(1, self._most_steps // 2)

    def decode(self, rows: Numbers, steps: int, longest: int, *, filtered: bool) -> Launched:
        """Write so many more tokens in each of these slots, or fewer where a turn ends; `longest` has so many."""
        size = decode_bucket(len(rows))
        few = len(rows) * min((cache.kv_heads for cache in self._model.shape.caches), default=1) <= FEW_PROGRAMS
        splits = SPLITS if few and longest >= LONG and not self._invariant else 1
        key = ("decode", size, steps, splits, filtered)
        numbers = np.full(size, -1, dtype=np.int32)
        numbers[: len(rows)] = rows
        buffer = self._transfers.up(key, numbers)
        output = self._output(key, steps, size)

        def work() -> None:
            output.step.zero_()
            drawing = self._drawing(buffer, filtered)
            each = torch.arange(size, dtype=torch.int32, device=self._device)
            for done in range(steps):
                try:
                    self._decode_step(buffer, each, drawing, output, splits)
                except torch.OutOfMemoryError as error:
                    if not done or torch.cuda.is_current_stream_capturing():
                        raise  # nothing has moved
                    raise EngineError("the device ran out of memory in the middle of a run") from error

        return self._launch(key, work, output)

    def _decode_step(self, rows: Tensor, each: Tensor, drawing: "_Drawing", output: DeviceOutput, splits: int) -> None:
        state = self._state
        live = state.active.index_select(0, drawing.slots)
        places = state.places.index_select(0, drawing.slots)
        slots = rows.masked_fill(live <= 0, -1)
        blocks = QueryBlocks(each, live, slots, places, 1)
        attend = PagedAttend(self._pages, state.table, slots, places, blocks, splits)
        tokens = state.last_token.index_select(0, drawing.slots)
        positions = places + state.shifts.index_select(0, drawing.slots) if self._model.reads_images else places
        recurrence = None
        if self.state_rows is not None:
            own = slots.masked_fill(slots < 0, self.state_rows.padding).long()
            recurrence = Recurrence((1,) * len(rows), self._states, own)
        inputs = ModelInputs(tokens, positions.long(), recurrence=recurrence)
        self._draw(self._model(inputs, attend), rows, drawing, output)

    def _drawing(self, rows: Tensor, filtered: bool) -> "_Drawing":
        state = self._state
        slots = rows.masked_fill(rows < 0, state.padding).long()
        return _Drawing(
            slots,
            state.keys.index_select(0, slots),
            state.temperature.index_select(0, slots),
            state.top_k.index_select(0, slots) if filtered else None,
            state.top_p.index_select(0, slots) if filtered else None,
        )

    def _draw(self, hidden: Tensor, rows: Tensor, drawing: "_Drawing", output: DeviceOutput) -> None:
        """The next token of each row, into its slot and the output."""
        state, d = self._state, drawing
        ahead = state.places.index_select(0, d.slots) + 1
        tokens, logprobs = choose(self._model.logits(hidden), d.keys, ahead, d.temperature, d.top_k, d.top_p)
        advance(
            tokens,
            logprobs,
            rows,
            active=state.active,
            last_token=state.last_token,
            places=state.places,
            remaining=state.remaining,
            stop_ids=state.stop_ids,
            out_tokens=output.tokens,
            out_logprobs=output.logprobs,
            step=output.step,
        )

    @property
    def _pages(self) -> PagePool:
        if self._pool is None:
            raise RuntimeError("there are no pages: the sampler sleeps")
        return self._pool

    def _output(self, key: tuple[object, ...], steps: int, rows: int) -> DeviceOutput:
        if key not in self._outputs:
            self._outputs[key] = DeviceOutput.on(self._device, steps, rows)
        return self._outputs[key]

    def _launch(self, key: tuple[object, ...] | None, work: Callable[[], None], output: DeviceOutput) -> Launched:
        """By a graph where the work has a key: every time of the same shape, on the same tensors."""
        span = None if self._clock is None else self._clock.begin()
        if key is None:
            work()
        else:
            self._graphs.run(key, work)
        if self._clock is not None and span is not None:
            self._clock.end(span)
        return self._transfers.down(output)


@dataclass(frozen=True, slots=True)
class _Drawing:
    """How the rows of a pass are drawn."""

    slots: Tensor
    """int64; padding where the row is nobody's."""
    keys: Tensor
    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
