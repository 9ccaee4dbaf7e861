"""Steps on masters in the CPU's memory: gradients come down and weights go up in pieces, through two buffers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from turnwise.engines.learners import adamw_8bit
from turnwise.engines.learners.adamw_8bit import BLOCK, AdamW8bit
from turnwise.engines.memory_plan import BUFFERS, buffer_bytes

UNIT = BLOCK
"""A tensor is cut at multiples of so many numbers only: no block of 8-bit moments is cut, and a CPU, which takes
several numbers at once and the last few one by one, rounds as it would in a whole tensor."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Numbers `start` to `stop` of a tensor, that lie in a buffer from `place` on."""

    name: str
    start: int
    stop: int
    place: int
    ends: bool
    """Whether it is the tensor's last."""

    def of(self, tensor: Tensor) -> Tensor:
        """These numbers of a contiguous tensor."""
        return tensor.view(-1)[self.start : self.stop]


def cut(sizes: Mapping[str, int], room: int) -> Iterator[list[Piece]]:
    """Tensors of so many numbers, one behind the other in buffers with room for `room` of them."""
    pieces: list[Piece] = []
    place = 0
    for name, size in sizes.items():
        start = 0
        while start < size:
            if place == room:
                yield pieces
                pieces, place = [], 0
            stop = min(size, start + room - place)
            pieces.append(Piece(name, start, stop, place, stop == size))
            place += -(-(stop - start) // UNIT) * UNIT
            start = stop
    if pieces:
        yield pieces


class OffloadedSteps:
    """Takes the steps of `parts` on `masters`, which lie in the CPU's memory, and rounds them into `parameters`.

    While the CPU works on what lies in one buffer, the other is filled or emptied. Every copy is queued on the
    device's current stream, so one that fills a buffer again waits for the one that empties it.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        masters: Mapping[str, nn.Parameter],
        parts: Iterable[torch.optim.Optimizer],
        device: torch.device,
        size: int | None = None,
    ) -> None:
        """`size` is that of a buffer, in bytes."""
        self._parameters, self._masters = parameters, masters
        self._groups = {m: (part, group) for part in parts for group in part.param_groups for m in group["params"]}
        size = size or buffer_bytes(sum(master.numel() for master in masters.values()))
        self._room = size // 4 // UNIT * UNIT
        self._buffers = [_Buffer(size, device) for _ in range(BUFFERS)]

    def take(self, gradients: Mapping[str, Tensor], scale: float | None) -> None:
        """One step of what has a gradient, multiplied by `scale`."""
        loads = self._loads(gradients)
        for number in range(len(loads) + 1):
            if number < len(loads):
                self._fetch(*loads[number], gradients)
            if number:
                pieces, buffer = loads[number - 1]
                buffer.wait()
                if scale is not None:
                    torch._foreach_mul_([buffer.numbers(piece) for piece in pieces], scale)
                self._step(pieces, buffer)
                self._send(pieces, buffer)

    def publish(self, names: Iterable[str]) -> None:
        """Round masters into the weights that are computed with."""
        for pieces, buffer in self._loads(names):
            buffer.wait()
            self._send(pieces, buffer)

    def _loads(self, names: Iterable[str]) -> "list[tuple[list[Piece], _Buffer]]":
        loads = cut({name: self._masters[name].numel() for name in names}, self._room)
        return [(pieces, self._buffers[number % BUFFERS]) for number, pieces in enumerate(loads)]

    def _fetch(self, pieces: Sequence[Piece], buffer: "_Buffer", gradients: Mapping[str, Tensor]) -> None:
        buffer.follow()
        for piece in pieces:  # widened before they travel: torch would do so in memory of its own behind the copy
            gradient = piece.of(gradients[piece.name].contiguous()).float()
            buffer.numbers(piece).copy_(gradient, non_blocking=True)
        buffer.mark()

    def _send(self, pieces: Sequence[Piece], buffer: "_Buffer") -> None:
        """Rounded before they travel: half the bytes."""
        for piece in pieces:
            parameter, master = self._parameters[piece.name], self._masters[piece.name]
            if parameter is not master:
                rounded = buffer.numbers(piece, parameter.dtype).copy_(piece.of(master.data))
                piece.of(parameter.data).copy_(rounded, non_blocking=True)
        buffer.mark()

    def _step(self, pieces: Sequence[Piece], buffer: "_Buffer") -> None:
        by_group: dict[int, list[Piece]] = {}
        for piece in pieces:
            part, group = self._groups[self._masters[piece.name]]
            if isinstance(part, AdamW8bit):
                self._step_8bit(piece, buffer.numbers(piece), part, group)
            else:
                by_group.setdefault(id(group), []).append(piece)
        for same in by_group.values():
            self._step_adamw(same, [buffer.numbers(piece) for piece in same])

    def _step_adamw(self, pieces: Sequence[Piece], gradients: list[Tensor]) -> None:
        masters = [self._masters[piece.name] for piece in pieces]
        part, group = self._groups[masters[0]]
        states = [_state(part, master) for master in masters]
        adamw_step(
            group,
            [piece.of(master.data) for piece, master in zip(pieces, masters, strict=True)],
            gradients,
            [piece.of(state["exp_avg"]) for piece, state in zip(pieces, states, strict=True)],
            [piece.of(state["exp_avg_sq"]) for piece, state in zip(pieces, states, strict=True)],
            [_count(piece, state) for piece, state in zip(pieces, states, strict=True)],
        )

    def _step_8bit(self, piece: Piece, gradient: Tensor, part: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        master = self._masters[piece.name]
        state, blocks = _state(part, master), slice(piece.start // BLOCK, -(-piece.stop // BLOCK))
        kinds = [kind for kind in state if kind != "step"]
        moments = {kind: state[kind][blocks] for kind in kinds} | {"step": _count(piece, state)}
        adamw_8bit.update(piece.of(master.data), gradient, moments, group)
        for kind in kinds:
            state[kind][blocks] = moments[kind]


class _Buffer:
    """Memory between the CPU and a device, page-locked where that is a GPU."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._bytes, self._device = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu), device
        self._event = torch.cuda.Event() if on_gpu else None

    def numbers(self, piece: Piece, dtype: torch.dtype = torch.float32) -> Tensor:
        """The place of a piece, for numbers of at most four bytes."""
        start = 4 * piece.place
        return self._bytes[start : start + (piece.stop - piece.start) * dtype.itemsize].view(dtype)

    def mark(self) -> None:
        """What is queued until now is what `wait` waits for."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Have the CPU wait for the copies that were marked."""
        if self._event is not None:
            self._event.synchronize()

    def follow(self) -> None:
        """Have the device wait for them, should they be on another stream."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


def adamw_step(
    group: Mapping[str, Any],
    masters: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    counts: list[Tensor],
) -> None:
    """One step of torch's fused AdamW, with the tensors looked up already."""
    beta1, beta2 = group["betas"]
    adamw(
        masters,
        gradients,
        first,
        second,
        [],
        counts,
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _state(part: torch.optim.Optimizer, master: Tensor) -> dict[str, Tensor]:
    """What the optimizer keeps for a parameter, zeros before its first step."""
    state: dict[str, Tensor] = part.state[master]
    if not state and isinstance(part, AdamW8bit):
        state.update(adamw_8bit.zero_moments(master))
    elif not state:
        moments = {kind: torch.zeros_like(master.data) for kind in ("exp_avg", "exp_avg_sq")}
        state.update({"step": torch.zeros((), dtype=torch.float32), **moments})
    return state


def _count(piece: Piece, state: Mapping[str, Tensor]) -> Tensor:
    """The number of steps, which a step adds 1 to: the tensor's own for its last piece only."""
    return state["step"] if piece.ends else state["step"].clone()
