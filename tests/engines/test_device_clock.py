"""A device is idle when no span of work covers the time, whoever began the spans and however they overlap."""

import threading
import time

import pytest
import torch

from turnwise.engines.device_clock import MOST_SPANS, DeviceClock, covered


def test_busy_is_the_union_of_the_spans():
    assert covered([]) == 0.0
    assert covered([(3.0, 4.0), (0.0, 1.0)]) == 2.0
    assert covered([(0.0, 2.0), (1.0, 3.0), (1.5, 1.75)]) == 3.0
    assert covered([(2.0, 2.0), (0.0, 5.0)]) == 5.0


def test_a_device_without_work_is_idle_and_one_at_work_is_not():
    clock = DeviceClock(torch.device("cpu"))
    assert clock.take() == 1.0
    span = clock.begin()
    time.sleep(0.002)
    share = clock.take()
    assert share is not None and 0.0 <= share < 1.0, "work under way counts up to now"
    time.sleep(0.002)
    assert clock.take() == 0.0, "and the rest of it later: nothing but this span has passed"
    clock.end(span)
    clock.take()
    assert clock.take() == 1.0 and clock._spans == []


def test_spans_of_two_threads_are_not_counted_twice():
    clock = DeviceClock(torch.device("cpu"))
    both = threading.Barrier(2)

    def work() -> None:
        span = clock.begin()
        both.wait(10)
        clock.end(span)

    thread = threading.Thread(target=work)
    thread.start()
    work()
    thread.join()
    share = clock.take()
    assert share is not None and 0.0 <= share <= 1.0


def test_what_has_ended_is_not_kept_as_marks():
    clock = DeviceClock(torch.device("cpu"))
    under_way = clock.begin()
    for _ in range(3 * MOST_SPANS):
        clock.end(clock.begin())
    assert len(clock._spans) <= MOST_SPANS
    share = clock.take()
    assert share is not None and 0.0 <= share < 1.0 and clock._spans == [under_way]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_spans_are_measured_on_its_streams_and_nothing_waits():
    clock = DeviceClock(torch.device("cuda"))
    factor = torch.randn(2048, 2048, device="cuda")
    side = torch.cuda.Stream()
    assert clock.take() is None
    for stream in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            span = clock.begin()
            for _ in range(20):
                factor @ factor
            clock.end(span)
    torch.cuda.synchronize()
    time.sleep(0.05)
    with torch.cuda.stream(side):
        clock.end(clock.begin())
    torch.cuda.synchronize()
    share = clock.take()
    assert share is not None and 0.0 < share < 1.0 and clock._spans == []
