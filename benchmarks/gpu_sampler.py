"""Tokens a second of our sampler alone on a GPU: PYTHONPATH=. python benchmarks/gpu_sampler.py [concurrent ...]."""

import asyncio
import sys
import time

import numpy as np
import torch

from turnwise.engines.device_clock import DeviceClock
from turnwise.engines.model.checkpoint_format import DecoderConfig
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.samplers.cuda import CudaSampler
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams

PROMPT, NEW = 128, 256
SMALL = DecoderConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 2048, tied=True)


async def measure(sampler: CudaSampler, concurrent: int, round_: int) -> int:
    """Write one turn for so many different prompts at once; the number of tokens."""
    rng = np.random.default_rng(round_)

    async def one(index: int) -> int:
        prompt = rng.integers(SMALL.vocab_size, size=PROMPT)
        name = f"{round_}/{concurrent}/{index}"
        done = await sampler.generate(Request(name, prompt, SamplingParams(NEW), NoiseKey(0, round_, "s", index)))
        await sampler.release(name)
        return len(done.token_ids)

    return sum(await asyncio.gather(*(one(index) for index in range(concurrent))))


async def main() -> None:
    """Two rounds to compile and capture, then the measured ones."""
    sizes = [int(size) for size in sys.argv[1:]] or [256, 1024]
    device = torch.device("cuda")
    model = Decoder.fresh(SMALL, 0, torch.bfloat16)
    clock = DeviceClock(device)
    start = time.perf_counter()
    sampler = CudaSampler(
        model,
        device=device,
        decode=str,
        max_batch=max(sizes),
        cache_bytes=40 << 30,
        invariant=False,
        clock=clock,
        say=print,
    )
    print(f"opened in {time.perf_counter() - start:.1f} s")
    for size in sizes:
        for round_ in range(5):
            clock.take()
            start = time.perf_counter()
            tokens = await measure(sampler, size, round_)
            seconds = time.perf_counter() - start
            idle = clock.take()
            print(f"{size} at once, round {round_}: {tokens / seconds:,.0f} tokens/s, idle {idle}, {sampler.stats}")
    await sampler.close()


asyncio.run(main())
