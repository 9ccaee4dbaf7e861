"""Where keys and values live: rows of active sequences, cached conversations, prompt prefixes shared by siblings."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnwise.engines.kernels.paged_attention import PAGE
from turnwise.engines.model.attention import KEY_PAD, padded
from turnwise.engines.model.policy_model import LayerCache, PolicyModel, StateShape
from turnwise.engines.model.recurrence import States, empty_states
from turnwise.engines.model.routing import RouterShape, Routing, expert_dtype
from turnwise.ledger import MediaSpan

PREFIX_BLOCK = PAGE
"""Tokens per shared block; prompts that agree on a whole block (and all before it) share it."""
FIRST_ROWS = 8
GROWTH = 1.25
"""Of the capacity; small, because a step reads rows of keys the faster the less room lies between them."""


@dataclass(frozen=True, slots=True)
class KVSpan:
    """Keys [layers, Hkv, D, n] and values [layers, Hkv, n, Dv] of n consecutive tokens, for each kind of layer; the
    states of recurrent layers with spans that begin at a sequence's first token."""

    length: int
    """The number of tokens."""
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    states: tuple[States, ...] = ()
    """Of each recurrent layer those behind the last of the tokens."""
    experts: tuple[Tensor, ...] = ()
    """[n, routers, k] where the model follows its routers: what they chose when keys and values were computed."""

    @property
    def bytes(self) -> int:
        """The memory that keys, values, states and choices take, in bytes."""
        parts = (*self.keys, *self.values, *chain.from_iterable(self.states), *self.experts)
        return sum(part.nbytes for part in parts)


class ActiveRows:
    """One row per active sequence, rows 0 to n without holes; rows and capacity grow when needed.

    Keys lie transposed, positions innermost: a decode step then reads both keys and values as plain row-major
    matrices, which is the faster half of a matrix product that is bound by memory. Layers that keep the same of a
    token lie in one tensor, so that a model of one kind of layer moves a sequence in one copy.
    """

    layers: list[tuple[Tensor, Tensor]]
    """Keys and values of each layer: what cached attention reads and writes."""
    states: list[States]
    """Of each recurrent layer those of every row, zeros where a sequence begins."""
    experts: tuple[Tensor, ...]
    """[rows, capacity, routers, k] of a model that follows its routers."""

    def __init__(
        self,
        caches: Sequence[LayerCache],
        dtype: torch.dtype,
        max_rows: int,
        device: torch.device | None = None,
        states: Sequence[StateShape] = (),
        routers: Sequence[RouterShape] = (),
    ) -> None:
        self._max_rows = max_rows
        self._caches, self._state_shapes, self._routers = tuple(caches), tuple(states), tuple(routers)
        self._kinds = tuple(dict.fromkeys(caches))
        self._dtype, self.device = dtype, device or torch.device("cpu")
        self._keep(min(FIRST_ROWS, max_rows), KEY_PAD)

    @classmethod
    def of(cls, model: PolicyModel, max_rows: int) -> "ActiveRows":
        """Rows for a model, in the number format and on the device of its weights."""
        first = next(model.parameters())
        return cls(model.shape.caches, first.dtype, max_rows, first.device, model.shape.states, model.shape.routers)

    @property
    def bytes(self) -> int:
        """The memory that keys, values, states and choices of all rows take, in bytes."""
        parts = (*self.keys, *self.values, *chain.from_iterable(self.states), *self.experts)
        return sum(tensor.nbytes for tensor in parts)

    def _empty(self, rows: int, capacity: int) -> tuple[list[Tensor], list[Tensor]]:
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for kind in self._kinds:
            layers = self._caches.count(kind)
            # Zeros, not garbage: what lies beyond a sequence is multiplied by zero, and zero times NaN is NaN.
            for tensors, shape in ((keys, (kind.key_dim, capacity)), (values, (capacity, kind.value_dim))):
                tensors.append(torch.zeros(layers, rows, kind.kv_heads, *shape, dtype=self._dtype, device=self.device))
        return keys, values

    def _keep(self, rows: int, capacity: int) -> None:
        self._size = rows, capacity
        self.keys, self.values = keys, values = self._empty(rows, capacity)
        self.states, self.experts = empty_states(self._state_shapes, rows, self.device), ()
        if self._routers:  # on the host: nothing computes with them here
            shape = rows, capacity, len(self._routers), self._routers[0].top_k
            self.experts = (torch.zeros(shape, dtype=expert_dtype(self._routers)),)
        self.layers, counts = [], dict.fromkeys(self._kinds, 0)
        for cache in self._caches:
            kind, number = self._kinds.index(cache), counts[cache]
            self.layers.append((keys[kind][number], values[kind][number]))
            counts[cache] += 1

    def reserve(self, rows: int, length: int) -> None:
        """Make room for this many rows of this many tokens."""
        have, capacity = self._size
        if rows <= have and length <= capacity:
            return
        more_rows = min(max(rows, 2 * have), self._max_rows) if rows > have else have
        more = padded(max(length, int(GROWTH * capacity)), KEY_PAD) if length > capacity else capacity
        before = self.keys, self.values, self.states, self.experts
        self._keep(more_rows, more)
        for new, old in zip(self.keys, before[0], strict=True):
            new[:, :have, :, :, :capacity] = old
        for new, old in zip(self.values, before[1], strict=True):
            new[:, :have, :, :capacity] = old
        for new, old in zip(chain.from_iterable(self.states), chain.from_iterable(before[2]), strict=True):
            new[:have] = old
        for new, old in zip(self.experts, before[3], strict=True):
            new[:have, :capacity] = old

    def begin(self, row: int) -> None:
        """A sequence begins in a row: what recurrent layers kept there of another is forgotten."""
        for state in chain.from_iterable(self.states):
            state[row] = 0

    def move(self, source: int, target: int, length: int) -> None:
        """Put the sequence of one row into another."""
        for keys in self.keys:
            keys[:, target, :, :, :length] = keys[:, source, :, :, :length]
        for values in self.values:
            values[:, target, :, :length] = values[:, source, :, :length]
        for state in chain.from_iterable(self.states):
            state[target] = state[source]
        for experts in self.experts:
            experts[target, :length] = experts[source, :length]

    def clear(self, row: int) -> None:
        """Zero a row that held NaN, which would outlive its sequence."""
        for tensor in (*self.keys, *self.values):
            tensor[:, row] = 0
        self.begin(row)

    def read(self, row: int, start: int, end: int) -> KVSpan:
        """A copy of tokens start to end of a row; with recurrent layers, of all that it has been fed."""
        plain = torch.contiguous_format
        keys = tuple(tensor[:, row, :, :, start:end].clone(memory_format=plain) for tensor in self.keys)
        values = tuple(tensor[:, row, :, start:end].clone(memory_format=plain) for tensor in self.values)
        states = tuple(tuple(state[row].clone() for state in layer) for layer in self.states)
        return KVSpan(end - start, keys, values, states, self.chosen(row, start, end))

    def chosen(self, row: int, start: int, end: int) -> tuple[Tensor, ...]:
        """A copy of what routers chose for tokens start to end of a row."""
        return tuple(experts[row, start:end].clone() for experts in self.experts)

    def note(self, rows: Tensor, places: Tensor, routing: Routing) -> None:
        """Keep what a pass chose for the tokens at these places of these rows."""
        for experts in self.experts:
            experts[rows, places] = routing.noted(experts.dtype)[: len(places)].cpu()

    def write(self, row: int, start: int, span: KVSpan) -> None:
        """Puts a span into a row, from position `start` on."""
        end = start + span.length
        for tensor, keys in zip(self.keys, span.keys, strict=True):
            tensor[:, row, :, :, start:end] = keys
        for tensor, values in zip(self.values, span.values, strict=True):
            tensor[:, row, :, start:end] = values
        for state, kept in zip(chain.from_iterable(self.states), chain.from_iterable(span.states), strict=True):
            state[row] = kept
        for experts, chosen in zip(self.experts, span.experts, strict=True):
            experts[row, start:end] = chosen


@dataclass(frozen=True, slots=True)
class SessionCache:
    """A conversation between turns: all its tokens, and the keys and values of all but those not yet fed."""

    token_ids: NDArray[np.int64]
    span: KVSpan
    media: tuple[MediaSpan, ...] = ()


class SessionCaches:
    """Caches of conversations between turns, the longest unused evicted beyond a byte budget."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._entries: OrderedDict[str, SessionCache] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, conversation: str) -> SessionCache | None:
        """What is kept for a conversation."""
        return self._entries.get(conversation)

    def put(self, conversation: str, cached: SessionCache) -> None:
        """Keep a conversation's cache; older ones may go, and this one too if it alone exceeds the budget."""
        self.drop(conversation)
        self._entries[conversation] = cached
        self.bytes += cached.span.bytes
        while self.bytes > self._budget:
            _, oldest = self._entries.popitem(last=False)
            self.bytes -= oldest.span.bytes

    def drop(self, conversation: str) -> None:
        """Forget a conversation; unknown names are fine."""
        cached = self._entries.pop(conversation, None)
        if cached is not None:
            self.bytes -= cached.span.bytes

    def clear(self) -> None:
        """Forgets the caches of all conversations."""
        self._entries.clear()
        self.bytes = 0


@dataclass(frozen=True, slots=True)
class PromptBlock:
    """A beginning of a prompt that others may share: its last tokens `start` to `end`, by a digest of all of it."""

    digest: bytes
    start: int
    end: int


def prompt_blocks(
    token_ids: NDArray[np.int64], media: Sequence[MediaSpan] = (), *, whole: bool = False
) -> list[PromptBlock]:
    """The blocks that a prompt is shared by; `whole`: one from its first token on, because the states of recurrent
    layers are kept behind its end only. The prompt's last token is never in a block, because it must be computed to
    know what follows."""
    digests = block_hashes(token_ids, media)
    if whole:
        return [PromptBlock(digests[-1], 0, len(digests) * PREFIX_BLOCK)] if digests else []
    return [PromptBlock(d, n * PREFIX_BLOCK, (n + 1) * PREFIX_BLOCK) for n, d in enumerate(digests)]


def block_hashes(token_ids: NDArray[np.int64], media: Sequence[MediaSpan] = ()) -> list[bytes]:
    """One digest per whole block, each covering everything before it, the images that begin there too."""
    digests: list[bytes] = []
    digest = b""
    for end in range(PREFIX_BLOCK, len(token_ids), PREFIX_BLOCK):
        start = end - PREFIX_BLOCK
        images = "".join(f"/{span.start} {span.media.digest}" for span in media if start <= span.start < end)
        content = token_ids[start:end].tobytes() + images.encode()
        digest = hashlib.blake2b(digest + content, digest_size=16).digest()
        digests.append(digest)
    return digests


class PrefixBlocks:
    """Keys and values of prompt blocks, the longest unused evicted beyond a byte budget."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._blocks: OrderedDict[bytes, KVSpan] = OrderedDict()
        self.bytes = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._blocks

    def clear(self) -> None:
        """Forgets all blocks of shared prefixes."""
        self._blocks.clear()
        self.bytes = 0

    def known(self, blocks: Sequence[PromptBlock]) -> int:
        """How many leading blocks are kept."""
        for count, block in enumerate(blocks):
            if block.digest not in self._blocks:
                return count
        return len(blocks)

    def take(self, blocks: Sequence[PromptBlock]) -> list[KVSpan]:
        """The blocks, now the most recently used; a chain's head counts as used after its tail, so tails go first."""
        for block in reversed(blocks):
            self._blocks.move_to_end(block.digest)
        return [self._blocks[block.digest] for block in blocks]

    def put(self, digest: bytes, span: KVSpan) -> None:
        """Keeps a block by its digest; those used least recently go when the budget is full."""
        if digest in self._blocks:
            return
        self._blocks[digest] = span
        self.bytes += span.bytes
        while self.bytes > self._budget:
            _, oldest = self._blocks.popitem(last=False)
            self.bytes -= oldest.bytes
