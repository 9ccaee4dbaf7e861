"""How much of the time a device had nothing to do: spans of work, marked on its streams and never waited for."""

import threading
import time
from dataclasses import dataclass

import torch

from turnwise.engines.device_utilisation import BusySamples

Mark = torch.cuda.Event | float
"""An event on a stream of a GPU, or a time of the host."""


MOST_SPANS = 256
"""Kept as marks before those that have ended are looked up."""


@dataclass(slots=True, eq=False)
class DeviceSpan:
    """Work that was handed to the device between two marks; the second is None while it is being handed over."""

    first: Mark
    last: Mark | None = None


class DeviceClock:
    """Marks the work of every thread and stream on one device: `span = clock.begin(); ...; clock.end(span)`.

    On a GPU the marks are events on the current stream, so a span lasts from when the device reaches the first to when
    it has reached the second, however long ago the host went on. Spans of several streams may overlap: busy is their
    union. On the CPU they are times of the host. Nothing here waits for the device. Whoever marks must also `take` now
    and then: spans are kept until then. On a GPU, none of this may be called while its own thread captures a graph.

    Gaps between the kernels of a span count as work, which is too much where launching them is the limit. With
    `samples` the share is the driver's, which counts the time in which kernels ran, those of other programs too.
    """

    def __init__(self, device: torch.device, samples: BusySamples | None = None) -> None:
        self.device, self._samples = device, samples
        self._lock = threading.Lock()
        self._spans: list[DeviceSpan] = []
        self._latest: dict[tuple[int, int], DeviceSpan] = {}
        """Of each thread and stream."""
        self._start: Mark = self._mark()
        """Where the last `take` ended."""
        self._busy: list[tuple[float, float]] = []
        """Seconds since then in which finished spans began and ended."""
        self._newest: tuple[float, Mark] = (0.0, self._start)
        """The last of those ends."""

    def begin(self) -> DeviceSpan:
        """Work starts here, on the current stream of this thread; as part of the span before it where the device has
        not come to the end of that one: there is no gap between them then."""
        where = (threading.get_ident(), self._stream())
        before = self._latest.get(where)
        if before is not None and before.last is not None and not _reached(before.last):
            before.last = None
            return before
        span = self._latest[where] = DeviceSpan(self._mark())
        with self._lock:
            self._spans.append(span)
            if len(self._spans) >= MOST_SPANS:
                self._fold()
        return span

    def end(self, span: DeviceSpan) -> None:
        """The work of this span has all been handed over; to be called on the stream that began it."""
        span.last = self._mark()

    def take(self) -> float | None:
        """The share of the time since the last take in which the device had nothing to do; None when no time passed.

        What the device has not finished counts as busy up to now, and the rest of it at the next take.
        """
        with self._lock:
            self._fold()
            begun = [(first, span.first) for span in self._spans if (first := self._seconds(span.first)) is not None]
            if self.device.type == "cuda":  # the newest mark that it has reached: it has no other clock
                now, mark = max([*begun, (self._newest[0], self._newest[1])], key=lambda entry: entry[0])
            else:
                mark = time.perf_counter()
                now = self._seconds(mark) or 0.0
            if now <= 0.0:
                return None
            busy = [*self._busy, *((max(0.0, first), now) for first, _ in begun)]
            self._start, self._busy, self._newest = mark, [], (0.0, mark)
        sampled = None if self._samples is None else self._samples.take()
        return 1.0 - (covered(busy) / now if sampled is None else sampled)

    def _fold(self) -> None:
        """Keep of spans that the device has finished only from when to when they were."""
        left: list[DeviceSpan] = []
        for span in self._spans:
            first, last = self._seconds(span.first), self._seconds(span.last)
            if first is None or last is None or span.last is None:
                left.append(span)
                continue
            self._busy.append((max(0.0, first), last))
            if last > self._newest[0]:
                self._newest = (last, span.last)
        self._spans = left

    def _stream(self) -> int:
        return 0 if self.device.type != "cuda" else int(torch.cuda.current_stream(self.device).cuda_stream)

    def _mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _seconds(self, mark: Mark | None) -> float | None:
        """Since the last take; None where the device has not come to the mark yet."""
        if mark is None:
            return None
        if isinstance(mark, float) or isinstance(self._start, float):
            assert isinstance(mark, float) and isinstance(self._start, float)
            return mark - self._start
        if not (_reached(self._start) and _reached(mark)):
            return None
        return float(self._start.elapsed_time(mark)) / 1e3


def _reached(mark: Mark) -> bool:
    """Whether the device has come to it."""
    return isinstance(mark, float) or bool(mark.query())


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, reached))
        reached = max(reached, last)
    return total
