"""Tokens per second of TorchSampler over transformers' generate, on two-turn episodes with a shared prompt prefix.

Both sides write the same number of tokens for the same prompts in one run, each with the thread count that is best
for it here. A user of `generate` must run the second turn over the whole longer prompt; that is part of the comparison.

    python benchmarks/sampler_cpu.py [--episodes 64] [--repeats 3]
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import turnwise
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.huggingface_folder import DecoderConfig
from turnwise.engines.samplers.cpu.threads import choose_threads, usable_cores
from turnwise.engines.samplers.cpu.torch_cpu import TorchSampler
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams

SHARED, OWN, NEW, REPLY = 170, (44, 57), 40, 20
TINY = DecoderConfig("qwen3", 1024, 128, 384, 4, 4, 2, 32, 2048, tied=True)


def load_decoder() -> tuple[Decoder, str]:
    """The bundled model where it has weights, else one of the same kind with random weights."""
    folder = Path(next(iter(turnwise.__path__))) / "engines" / "bundled" / "tiny"
    if (folder / "model.safetensors").is_file():
        return Decoder.read(folder), "bundled tiny model"
    return Decoder.fresh(TINY, 0), "random weights"


def make_prompts(episodes: int, vocab: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts that share a prefix and differ in length, and the replies between the turns."""
    noise = np.random.default_rng(0)
    shared = noise.integers(vocab, size=SHARED).tolist()
    prompts = [shared + noise.integers(vocab, size=noise.integers(*OWN)).tolist() for _ in range(episodes)]
    return prompts, [noise.integers(vocab, size=REPLY).tolist() for _ in range(episodes)]


async def ours(sampler: TorchSampler, prompts: list[list[int]], replies: list[list[int]], run: int) -> int:
    """Every episode runs on its own; returns how many tokens were written."""
    params = SamplingParams(max_tokens=NEW)

    async def episode(index: int) -> int:
        name, key = f"{run}/{index}", NoiseKey(0, run, "episode", index)
        first = await sampler.generate(Request(name, np.array(prompts[index]), params, key))
        second_prompt = [*prompts[index], *first.token_ids, *replies[index]]
        second = await sampler.generate(Request(name, np.array(second_prompt), params, key))
        await sampler.release(name)
        return len(first.token_ids) + len(second.token_ids)

    return sum(await asyncio.gather(*(episode(index) for index in range(len(prompts)))))


def theirs(model: Any, prompts: list[list[int]], replies: list[list[int]]) -> int:
    """Two batched generate calls over left-padded prompts; returns how many tokens were written."""
    written = 0
    sequences = prompts
    for turn in range(2):
        width = max(map(len, sequences))
        ids = torch.tensor([[0] * (width - len(s)) + s for s in sequences])
        mask = torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in sequences])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
        )
        new = out[:, width:].tolist()
        written += sum(map(len, new))
        if turn == 0:
            sequences = [[*s, *n, *r] for s, n, r in zip(sequences, new, replies, strict=True)]
    return written


def load_reference(decoder: Decoder) -> Any:
    """The same weights in transformers, without an end token so that every turn has its full length."""
    with tempfile.TemporaryDirectory() as folder:
        decoder.save(Path(folder))
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def timed(work: Callable[[], int]) -> tuple[float, int]:
    start = time.perf_counter()
    tokens = work()
    return time.perf_counter() - start, tokens


def best_reference_threads(model: Any, prompts: list[list[int]], replies: list[list[int]]) -> int:
    """The thread count with which generate is faster, by a small run of each."""
    few, answers = prompts[: max(1, len(prompts) // 2)], replies[: max(1, len(prompts) // 2)]
    seconds: dict[int, float] = {}
    for count in sorted({1, usable_cores()}):
        torch.set_num_threads(count)
        seconds[count] = timed(lambda: theirs(model, few, answers))[0]
    return min(seconds, key=lambda count: seconds[count])


async def measure(episodes: int, repeats: int) -> None:
    decoder, what = load_decoder()
    prompts, replies = make_prompts(episodes, decoder.config.vocab_size)
    choice = choose_threads(decoder, 0)
    model = load_reference(decoder)
    their_threads = best_reference_threads(model, prompts, replies)
    sampler = TorchSampler(decoder, decode=str, max_batch=episodes, threads=choice.threads, regime=choice.regime)
    await ours(sampler, prompts[:2], replies[:2], run=0)
    our_seconds, their_seconds, tokens = [], [], 0
    for run in range(1, repeats + 1):  # in turn, so that a busy moment of the machine hits both sides
        # A new sampler each time: the prefix must not be known from the run before.
        await sampler.close()
        sampler = TorchSampler(decoder, decode=str, max_batch=episodes, threads=choice.threads, regime=choice.regime)
        start = time.perf_counter()
        tokens = await ours(sampler, prompts, replies, run)
        our_seconds.append(time.perf_counter() - start)
        torch.set_num_threads(their_threads)
        seconds, their_tokens = timed(lambda: theirs(model, prompts, replies))
        their_seconds.append(seconds)
        assert tokens == their_tokens, (tokens, their_tokens)
    stats = sampler.stats
    await sampler.close()
    mine, reference = sorted(our_seconds)[repeats // 2], sorted(their_seconds)[repeats // 2]
    print(f"{what}, {episodes} two-turn episodes, {tokens} tokens written, median of {repeats}")
    print(f"TorchSampler           {tokens / mine:9.0f} tokens/s  {choice.threads} thread(s), {choice.invariant=}")
    print(choice.regime)
    print(f"transformers.generate  {tokens / reference:9.0f} tokens/s  {their_threads} thread(s)")
    print(f"ratio                  {reference / mine:9.2f}")
    print(stats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with torch.no_grad():
        asyncio.run(measure(arguments.episodes, arguments.repeats))


if __name__ == "__main__":
    main()
