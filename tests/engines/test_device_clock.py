"""A device is idle when no span of work covers the time, whoever began the spans and however they overlap."""

import threading
import time

import pytest
import torch

from turnwise.engines.device_clock import MOST_SPANS, DeviceClock, covered
from turnwise.engines.device_utilisation import BusySamples, _driver, busy_samples


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


def test_what_the_driver_says_stands_where_it_says_something():
    samples = BusySamples(lambda: None)
    clock = DeviceClock(torch.device("cpu"), samples)
    assert clock.take() == 1.0, "no sample yet: the spans are all that is known"
    span = clock.begin()
    for share in (0.0, 0.5, 0.1):
        samples.add(share)
    assert clock.take() == pytest.approx(0.8), "gaps inside a span are no work"
    clock.end(span)


def test_a_driver_is_sampled_until_nobody_holds_the_samples():
    seen, ended = threading.Event(), []

    def read() -> float | None:
        if len(ended) < 3:
            ended.append(None)
            return None if len(ended) == 1 else 0.25
        seen.set()
        return 0.25

    before = set(threading.enumerate())
    samples = BusySamples(read, seconds=0.001)
    (thread,) = set(threading.enumerate()) - before
    assert seen.wait(30) and samples.take() == 0.25, "what says nothing is not counted as idle"
    del samples
    thread.join(30)
    assert not thread.is_alive()


def test_a_machine_without_the_driver_has_no_samples():
    assert busy_samples(torch.device("cpu")) is None
    assert _driver("GPU-00000000-0000-0000-0000-000000000000") is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_its_driver_is_found_and_says_that_kernels_run():
    device = torch.device("cuda")
    samples = busy_samples(device)
    assert samples is not None
    factor = torch.randn(4096, 4096, device=device)
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        for _ in range(20):
            factor @ factor
        torch.cuda.synchronize()
    share = samples.take()
    assert share is not None and share > 0.5


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
