"""What a batcher tells two requests for its one place about how long they waited."""

from turnwise.engines.samplers.in_flight import QueuedRequest
from turnwise.engines.samplers.in_process import Batching


def assert_the_second_waits_for_the_first(
    batcher: Batching, first: QueuedRequest, second: QueuedRequest, now: list[float]
) -> None:
    """`now` is the clock, which the test sets."""
    assert batcher.submit(first) is batcher.submit(second) is None
    now[0] = 10.0
    assert (batcher.waited(first), batcher.waited(second)) == (10.0, 10.0)
    batcher.step()
    now[0] = 25.0
    assert (batcher.waited(first), batcher.waited(second)) == (10.0, 25.0), "the first is writing, the second waits"
    while batcher.waited(second) == now[0]:
        batcher.step()
        now[0] += 1.0
    begun = batcher.waited(second)
    now[0] += 100.0
    assert batcher.waited(second) == begun and batcher.waited(first) == 10.0
