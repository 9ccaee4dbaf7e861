"""The delay of the event loop, on a clock that is moved by hand."""

import asyncio

from turnwise.training.event_loop_lag import LoopLag


def test_the_worst_delay_since_the_last_question_is_told():
    now = [0.0]

    async def block(seconds):
        now[0] += seconds  # the loop does nothing else meanwhile
        for _ in range(3):
            await asyncio.sleep(0)

    async def main():
        async with LoopLag(interval=0.0, clock=lambda: now[0]) as lag:
            await asyncio.sleep(0)
            for seconds in (0.25, 3.0, 0.5):
                await block(seconds)
            first = lag.take()
            await block(0.125)
            return first, lag.take(), lag.take()

    names = [{"timing_s/loop_lag_max": worst} for worst in (3.0, 0.125, 0.0)]
    assert list(asyncio.run(main())) == names


def test_what_was_waited_for_on_purpose_is_no_delay():
    now = [0.0]

    async def main():
        async with LoopLag(interval=2.0, clock=lambda: now[0]) as lag:
            await asyncio.sleep(0)
            return lag.take()

    assert asyncio.run(main()) == {"timing_s/loop_lag_max": 0.0}
