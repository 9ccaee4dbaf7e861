"""Sequences fed to a model in chunks through a cache of pages, as a sampler does it: for tests of both decoders."""

from collections.abc import Sequence

import torch
from torch import Tensor

from turnwise.engines.kernels.paged_attention import PAGE, QueryBlocks, paged_attention, write_pages
from turnwise.engines.kernels.rows import Rotation, rotate_into_pages
from turnwise.engines.model.policy_model import Mixing, ModelInputs, PolicyModel

Chunk = tuple[int, int, int]
"""Slot, first position, and the position behind the last one."""


class Pages:
    """A cache of `slots` sequences of up to `longest` tokens in scattered pages; queries go in blocks of `size`."""

    def __init__(self, model: PolicyModel, slots: int, longest: int, size: int) -> None:
        weight = next(model.parameters())
        self.size, self.device = size, weight.device
        width = -(-longest // PAGE)
        scattered = torch.randperm(slots * width, generator=torch.Generator().manual_seed(0))
        self.table = scattered.view(slots, width).int().to(self.device)
        self.layers = [
            [torch.full((slots * width, c.kv_heads, PAGE, dim), 9.0).to(weight) for dim in (c.key_dim, c.value_dim)]
            for c in model.shape.caches
        ]

    def chunks(self, chunks: Sequence[Chunk]) -> None:
        """What the next pass holds."""
        numbers: list[tuple[int, int, int, int]] = []
        slots: list[int] = []
        places: list[int] = []
        for slot, start, end in chunks:
            numbers += [
                (len(slots) + at - start, min(self.size, end - at), slot, at) for at in range(start, end, self.size)
            ]
            slots += [slot] * (end - start)
            places += range(start, end)
        first, count, slot_of, place = torch.tensor(numbers, dtype=torch.int32, device=self.device).t().contiguous()
        self.blocks = QueryBlocks(first, count, slot_of, place, self.size)
        self.slots, self.places = (torch.tensor(x, dtype=torch.int32, device=self.device) for x in (slots, places))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mixing: Mixing, /) -> Tensor:
        keys, values = self.layers[layer]
        write_pages(keys, values, k, v, self.table, self.slots, self.places)
        return self._mix(layer, q, mixing)

    def rotated(self, layer: int, fused: Tensor, rotation: Rotation) -> Tensor:
        keys, values = self.layers[layer]
        return self._mix(layer, rotate_into_pages(fused, rotation, keys, values, self.table, self.slots), Mixing())

    def _mix(self, layer: int, q: Tensor, mixing: Mixing) -> Tensor:
        scale = q.shape[-1] ** -0.5 if mixing.scale is None else mixing.scale
        further = {"window": mixing.window, "softcap": mixing.softcap, "sinks": mixing.sinks}
        return paged_attention(q, *self.layers[layer], self.table, self.blocks, scale=scale, **further)

    @torch.no_grad()
    def states(self, model: PolicyModel, tokens: Sequence[Tensor], chunks: Sequence[Chunk]) -> Tensor:
        """The hidden states of some chunks in one pass; `tokens` are those of each slot."""
        self.chunks(chunks)
        given = torch.cat([tokens[slot][start:end] for slot, start, end in chunks])
        return model(ModelInputs(given.to(self.device), self.places.long()), self)


def continued(model: PolicyModel, tokens: Tensor, parts: Sequence[int], size: int) -> Tensor:
    """The states of one sequence that is fed in parts."""
    pages, start, found = Pages(model, 2, len(tokens), size), 0, []
    for part in parts:
        found.append(pages.states(model, [tokens, tokens], [(1, start, start + part)]))
        start += part
    return torch.cat(found)
