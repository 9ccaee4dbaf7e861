"""How much of the time a device had nothing to do: spans of work, marked on its streams and never waited for."""

import threading
import time
from dataclasses import dataclass

import torch

Mark = torch.cuda.Event | float
"""An event on a stream of a GPU, or a time of the host."""


@dataclass(slots=True, eq=False)
class Span:
    """Work that was handed to the device between two marks; the second is None while it is being handed over."""

    first: Mark
    last: Mark | None = None


class DeviceClock:
    """Marks the work of every thread and stream on one device: `span = clock.begin(); ...; clock.end(span)`.

    On a GPU the marks are events on the current stream, so a span lasts from when the device reaches the first to when
    it has reached the second, however long ago the host went on. Spans of several streams may overlap: busy is their
    union. On the CPU they are times of the host. Nothing here waits for the device. Whoever marks must also `take` now
    and then: spans are kept until then. On a GPU, none of this may be called while its own thread captures a graph.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._start = self._mark()
        """Where the last `take` ended."""

    def begin(self) -> Span:
        """Work starts here, on the current stream of this thread."""
        span = Span(self._mark())
        with self._lock:
            self._spans.append(span)
        return span

    def end(self, span: Span) -> None:
        """The work of this span has all been handed over; to be called on the stream that began it."""
        span.last = self._mark()

    def take(self) -> float | None:
        """The share of the time since the last take in which the device had nothing to do; None when no time passed.

        What the device has not finished counts as busy up to now, and the rest of it at the next take.
        """
        with self._lock:
            now_mark, now = self._now()
            if now_mark is None or now <= 0.0:
                return None
            busy: list[tuple[float, float]] = []
            left: list[Span] = []
            for span in self._spans:
                first, last = self._seconds(span.first), self._seconds(span.last)
                if last is None or last > now:
                    left.append(span)
                if first is not None and first < now:
                    busy.append((max(0.0, first), now if last is None else min(last, now)))
            self._spans, self._start = left, now_mark
        return 1.0 - covered(busy) / now

    def _mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _now(self) -> tuple[Mark | None, float]:
        """The host's clock on a CPU. On a GPU the newest mark that it has reached: it has no other clock."""
        if self.device.type != "cuda":
            mark = time.perf_counter()
            return mark, self._seconds(mark) or 0.0
        marks = [mark for span in self._spans for mark in (span.first, span.last) if mark is not None]
        reached = [(seconds, mark) for mark in marks if (seconds := self._seconds(mark)) is not None]
        newest = max(reached, key=lambda found: found[0], default=(0.0, None))
        return newest[1], newest[0]

    def _seconds(self, mark: Mark | None) -> float | None:
        """Since the last take; None where the device has not come to the mark yet."""
        if mark is None:
            return None
        if isinstance(mark, float) or isinstance(self._start, float):
            assert isinstance(mark, float) and isinstance(self._start, float)
            return mark - self._start
        if not (self._start.query() and mark.query()):
            return None
        return float(self._start.elapsed_time(mark)) / 1e3


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, reached))
        reached = max(reached, last)
    return total
