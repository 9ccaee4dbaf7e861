"""A learner's attention over packed sequences: the fastest way a layer can take, or the sampler's own to the bit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import SDPBackend

from turnwise.engines.kernels.paged_attention import PAGE, QueryBlocks, invariant_size, paged_attention, write_pages
from turnwise.engines.kernels.rows import Rotation, rotate
from turnwise.engines.model import attention
from turnwise.engines.model.attention import sent
from turnwise.engines.model.policy_model import Attend, Mixing, PolicyModel

PLAIN = Mixing()
FLASH_HEAD = 256
"""The largest head dimension of torch's flash attention, which takes multiples of 8."""


class Way(StrEnum):
    """How packed sequences are attended to with a gradient."""

    FLASH = "flash"
    """torch's flash attention over sequences that lie behind one another."""
    RECTANGLES = "rectangles"
    """`attention.packed`: sequences of similar length as rectangles; knows soft caps and sinks, and every device."""


def way_of(
    lengths: Sequence[int], device: torch.device, dtype: torch.dtype, sizes: tuple[int, int], mixing: Mixing
) -> Way:
    """One rectangle without padding is fastest as such; flash attention wherever rows would have to be moved.

    `sizes` are the head dimensions of keys and of values.
    """
    narrow = dtype in (torch.bfloat16, torch.float16)
    fits = sizes[0] == sizes[1] and sizes[0] % 8 == 0 and sizes[0] <= FLASH_HEAD
    bent = mixing.softcap is not None or mixing.sinks is not None
    hides = mixing.window is not None and mixing.window < max(lengths)
    even = min(lengths) == max(lengths)
    if device.type != "cuda" or not narrow or not fits or bent or (even and not hides):
        return Way.RECTANGLES
    return Way.FLASH


def attend_for(lengths: Sequence[int], device: torch.device, model: PolicyModel, invariant: bool) -> "PackedAttend":
    """The attention of a learner's pass over sequences of these lengths; makes the model ready for them too."""
    model.prepare(max(lengths))
    return PackedAttend(lengths, device, invariant=invariant)


class Attended(Protocol):
    """One layer's attention, with what its gradient needs; asked for it once."""

    def gradient(self, by_mixed: Tensor) -> tuple[Tensor, ...]:
        """What queries, keys and values get, from the gradient [T, Hq * D] of their mixture."""
        ...


def attended(attend: Attend, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Attended]:
    """The attention of a plain layer, for a caller without autograd who will ask for the gradient himself."""
    if isinstance(attend, PackedAttend):
        return attend.attended(q, k, v)
    return _graph(lambda q, k, v: attend(layer, q, k, v, PLAIN), q, k, v)


class PackedAttend:
    """Causal attention within each of several concatenated sequences; differentiable, and a `FusedAttend`.

    `invariant` computes each query as a sampler's decode step does, by its bits; the gradient is still the fast way's.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device, *, invariant: bool) -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"sequence lengths must be positive, found {list(lengths)}")
        self._lengths, self._device = list(lengths), device
        self._longest = max(lengths)
        self._even = min(lengths) == self._longest
        self._way: Way | None = None
        self._by_cudnn: bool | None = None
        self._pages = _Pages(lengths, device) if invariant else None
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self._starts = sent(starts, device)

    @cached_property
    def _rectangles(self) -> Attend:
        """Made when a layer asks for it: with flash attention none does."""
        return attention.packed(self._lengths, self._device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mixing: Mixing, /) -> Tensor:
        """As `Attend` promises; `layer` does not matter here."""
        if q.is_cuda and torch.is_autocast_enabled("cuda"):  # as torch's own attention does
            dtype = torch.get_autocast_dtype("cuda")
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if self._pages is None:
            return self.fast(q, k, v, mixing)
        if not torch.is_grad_enabled():
            return self._pages.attend(q, k, v, mixing)
        return cast(Tensor, cast(Any, _AsSampled).apply(self, q, k, v, mixing.sinks, mixing))

    def rotated(self, layer: int, fused: Tensor, rotation: Rotation) -> Tensor:
        """Rotation and attention of a plain layer."""
        q, k, v = rotate(fused, rotation)
        return self(layer, q, k, v, PLAIN)

    def fast(self, q: Tensor, k: Tensor, v: Tensor, mixing: Mixing, way: Way | None = None) -> Tensor:
        """The differentiable attention [T, Hq * Dv], by the way that suits unless one is named."""
        sizes = (k.shape[2], v.shape[2])
        if (way or way_of(self._lengths, q.device, q.dtype, sizes, mixing)) is Way.RECTANGLES:
            return self._rectangles(0, q, k, v, mixing)
        return self._flash(q, k, v, mixing)[0].reshape(len(q), -1)

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Attended]:
        """See the function of this name."""
        if self._pages is not None:
            return self._pages.attend(q, k, v, PLAIN), _Sampled(self, q, k, v)
        return self.fast_attended(q, k, v)

    def fast_attended(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Attended]:
        """The same by the fastest way; every layer takes the first one's, since all have its shapes."""
        if self._way is None:
            self._way = way_of(self._lengths, q.device, q.dtype, (k.shape[2], v.shape[2]), PLAIN)
        if self._way is Way.FLASH:
            mixed, *extras = self._flash(q, k, v, PLAIN)
            flash = _Flash(self._starts, self._longest, q, k, v, mixed, *extras[:3])
            return mixed.view(q.shape[0], -1), flash
        if not self._even:
            return _graph(lambda q, k, v: self._rectangles(0, q, k, v, PLAIN), q, k, v)
        rectangles = (self._rectangle(q), self._rectangle(k), self._rectangle(v))
        by_cudnn = q.is_cuda and self._takes_cudnn(*rectangles)
        mixed, even = _cudnn(*rectangles) if by_cudnn else _graph(_mix_even, *rectangles)
        return mixed.transpose(1, 2).reshape(q.shape[0], -1), _Even(self._rectangle, q.shape, even)

    def _rectangle(self, x: Tensor) -> Tensor:
        """Packed heads [T, H, D] of sequences of one length as [n, H, length, D]."""
        return x.view(len(self._lengths), self._longest, *x.shape[1:]).transpose(1, 2)

    def _takes_cudnn(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether torch would have cuDNN attend to rectangles like these; of all layers the first is asked."""
        if self._by_cudnn is None:
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                grouped = q.shape[1] != k.shape[1]
                choice = cast(Any, torch)._fused_sdp_choice(*leaves, None, 0.0, True, scale=None, enable_gqa=grouped)
            self._by_cudnn = choice == SDPBackend.CUDNN_ATTENTION.value
        return self._by_cudnn

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, mixing: Mixing) -> tuple[Tensor, ...]:
        """The mixture [T, Hq, D], and what its gradient needs: log-sum-exp and two states of a dropout there is not."""
        longest = self._longest
        hides = mixing.window is not None and mixing.window < longest
        outputs = torch.ops.aten._flash_attention_forward.default(
            q,
            k,
            v,
            self._starts,
            self._starts,
            longest,
            longest,
            0.0,  # dropout
            True,  # causal
            False,  # nothing to debug
            scale=q.shape[-1] ** -0.5 if mixing.scale is None else mixing.scale,
            window_size_left=mixing.window - 1 if hides and mixing.window is not None else None,
            window_size_right=0 if hides else None,
        )
        return cast(tuple[Tensor, ...], outputs)

    def as_sampled(self, q: Tensor, k: Tensor, v: Tensor, mixing: Mixing) -> Tensor:
        """The bits of a sampler's decode step, without gradient."""
        assert self._pages is not None
        return self._pages.attend(q, k, v, mixing)


@dataclass(frozen=True, slots=True)
class _Graph:
    """torch's own gradient, of a graph that begins at copies of what was given."""

    mixed: Tensor
    given: tuple[Tensor, ...]

    def gradient(self, by_mixed: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.mixed, self.given, by_mixed)


def _graph(run: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, _Graph]:
    with torch.enable_grad():
        leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
        mixed = run(*leaves)
    return mixed.detach(), _Graph(mixed, leaves)


def _mix_even(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rectangles [n, H, length, D] without padding, as `attention.packed` mixes them."""
    grouped = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def _cudnn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, "_Cudnn"]:
    """The same by cuDNN, called as torch calls it."""
    op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    mixed, sums, *extras = op(q, k, v, None, True, 0.0, True, False)
    return mixed, _Cudnn(q, k, v, mixed, sums, tuple(extras[:6]))


@dataclass(frozen=True, slots=True)
class _Cudnn:
    """cuDNN's attention over rectangles, its backward called without a graph."""

    q: Tensor
    k: Tensor
    v: Tensor
    mixed: Tensor
    sums: Tensor
    """Log-sum-exp."""
    more: tuple[Any, ...]
    """Starts and greatest lengths of sequences, and the state of a dropout there is not."""

    def gradient(self, by_mixed: Tensor) -> tuple[Tensor, ...]:
        *lengths, seed, offset = self.more
        op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
        arguments = (by_mixed, self.q, self.k, self.v, self.mixed, self.sums, seed, offset, None, *lengths, 0.0, True)
        return cast(tuple[Tensor, ...], op(*arguments))


@dataclass(frozen=True, slots=True)
class _Even:
    """Of sequences of one length: packed rows are rectangles already, and only looked at as such."""

    rectangle: Callable[[Tensor], Tensor]
    shape: torch.Size
    """Of the queries."""
    kept: Attended

    def gradient(self, by_mixed: Tensor) -> tuple[Tensor, ...]:
        gradients = self.kept.gradient(self.rectangle(by_mixed.view(self.shape)))
        return tuple(x.transpose(1, 2).flatten(0, 1) for x in gradients)


@dataclass(frozen=True, slots=True)
class _Flash:
    """torch's flash attention, its backward called without its graph."""

    starts: Tensor
    longest: int
    q: Tensor
    k: Tensor
    v: Tensor
    mixed: Tensor
    sums: Tensor
    """Log-sum-exp."""
    state: Tensor
    """Of dropout, as the next."""
    more_state: Tensor

    def gradient(self, by_mixed: Tensor) -> tuple[Tensor, ...]:
        gradients = torch.ops.aten._flash_attention_backward.default(
            by_mixed.view(self.mixed.shape),
            self.q,
            self.k,
            self.v,
            self.mixed,
            self.sums,
            self.starts,
            self.starts,
            self.longest,
            self.longest,
            0.0,  # dropout
            True,  # causal
            self.state,
            self.more_state,
            scale=self.q.shape[-1] ** -0.5,
        )
        return cast(tuple[Tensor, ...], gradients)


@dataclass(frozen=True, slots=True)
class _Sampled:
    """The sampler's bits forward; backward computes the fast way again and takes its gradient."""

    attend: PackedAttend
    q: Tensor
    k: Tensor
    v: Tensor

    def gradient(self, by_mixed: Tensor) -> tuple[Tensor, ...]:
        return self.attend.fast_attended(self.q, self.k, self.v)[1].gradient(by_mixed)


class _Pages:
    """Room for one layer's keys and values, as a sampler's cache has it; every layer uses it in turn."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        counts = [-(-length // PAGE) for length in lengths]
        self._total, widest, next_page = sum(counts), max(counts), 0
        table = torch.zeros(len(lengths), widest, dtype=torch.int32)
        for row, count in enumerate(counts):
            table[row, :count] = torch.arange(next_page, next_page + count, dtype=torch.int32)
            next_page += count
        self._table = sent(table, device)
        self._lengths, self._device = list(lengths), device
        slots = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
        self._slots, self._places = sent(slots, device), sent(attention.positions(lengths).int(), device)
        self._blocks: dict[int, QueryBlocks] = {}
        self._room: dict[tuple[int, int, int, torch.dtype], tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mixing: Mixing) -> Tensor:
        """As many queries to a block as leave each the bits that it has alone."""
        keys, values = self._pages_like(k, v)
        write_pages(keys, values, k, v, self._table, self._slots, self._places)
        scale = q.shape[-1] ** -0.5 if mixing.scale is None else mixing.scale
        return paged_attention(
            q,
            keys,
            values,
            self._table,
            self._blocks_of(invariant_size(q.shape[1], k.shape[1])),
            scale=scale,
            window=mixing.window,
            softcap=mixing.softcap,
            sinks=mixing.sinks,
        )

    def _blocks_of(self, size: int) -> QueryBlocks:
        if size not in self._blocks:
            slot, position, count, first, start = [], [], [], [], 0
            for row, length in enumerate(self._lengths):
                places = torch.arange(0, length, size)
                slot.append(torch.full_like(places, row))
                position.append(places)
                count.append((length - places).clamp(max=size))
                first.append(start + places)
                start += length
            columns = [sent(torch.cat(parts).int(), self._device) for parts in (first, count, slot, position)]
            self._blocks[size] = QueryBlocks(columns[0], columns[1], columns[2], columns[3], size)
        return self._blocks[size]

    def _pages_like(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        kind = (k.shape[1], k.shape[2], v.shape[2], k.dtype)
        if kind not in self._room:
            keys, values = (
                torch.zeros(self._total, k.shape[1], PAGE, size, dtype=k.dtype, device=k.device)
                for size in (k.shape[2], v.shape[2])
            )
            self._room[kind] = keys, values
        return self._room[kind]


class _AsSampled(torch.autograd.Function):
    """Forward to the sampler's bits; backward computes the fast way again and takes its gradient."""

    @staticmethod
    def forward(
        ctx: Any, attend: PackedAttend, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mixing: Mixing
    ) -> Tensor:
        ctx.attend, ctx.mixing = attend, mixing
        ctx.save_for_backward(q, k, v, sinks)
        return attend.as_sampled(q, k, v, mixing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        leaves = [None if x is None else x.detach().requires_grad_(need) for x, need in _needed(ctx)]
        q, k, v, sinks = leaves
        assert q is not None and k is not None and v is not None
        m = ctx.mixing
        with torch.enable_grad():
            mixed = ctx.attend.fast(q, k, v, Mixing(m.scale, m.window, m.softcap, sinks))
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        results = iter(torch.autograd.grad(mixed, wanted, gradients[0]))
        return (None, *(next(results) if x is not None and x.requires_grad else None for x in leaves), None)


def _needed(ctx: Any) -> list[tuple[Tensor | None, bool]]:
    """The tensors kept, each with whether its gradient is asked for."""
    return list(zip(ctx.saved_tensors, ctx.needs_input_grad[1:5], strict=True))
