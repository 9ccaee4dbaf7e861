"""Tokens per second and peak memory of one training step over plain transformers, on sequences of uneven length.

Both sides do the same work in one run: forward, log-probs and entropies of the policy's tokens, backward and an AdamW
step, from the same weights, to the same loss and gradient norm. The peer pads its batch and the model makes the logits
of every token, as plain transformers does. Each side runs in processes of its own, in turn with the other, with the
thread count that is better for it. Tokens are real ones, padding is not counted.

    python benchmarks/learner.py [--device cpu] [--rounds 3] [--seconds 4] [--recompute]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import turnwise
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.huggingface_folder import DecoderConfig

MIDDLE = DecoderConfig("qwen3", 32_000, 384, 1024, 4, 6, 2, 64, 2048, tied=True)
"""About 20 million parameters, 12 of them in the embedding."""
LARGE = DecoderConfig("qwen3", 151_936, 1024, 3072, 28, 16, 8, 128, 40_960, tied=True)
"""The shape of Qwen3-0.6B."""
CASES = {"tiny": (32, 512), "middle": (8, 512), "large": (16, 2048)}
"""Sequences of a batch, and the longest."""
LR = 1e-4


def batch_of(case: str, vocab: int) -> tuple[list[list[int]], list[list[bool]]]:
    """Sequences from a quarter of the longest up, a third of each prompt, the rest in turns of policy and tool."""
    noise = np.random.default_rng(0)
    count, longest = CASES[case]
    lengths = noise.integers(longest // 4, longest + 1, size=count)
    lengths[0] = longest
    tokens = [noise.integers(vocab, size=length).tolist() for length in lengths]
    masks = [[place >= length // 3 and place % 60 >= 20 for place in range(length)] for length in lengths]
    return tokens, masks


def ours(folder: Path, case: str, device: str, recompute: bool) -> Callable[[], tuple[float, float]]:
    """A step of the learner; returns loss and gradient norm."""
    from turnwise.config import LearnerConfig
    from turnwise.engines.learners.learner import SUPERVISED, TokenBatch
    from turnwise.engines.learners.local import LocalLearner

    config = LearnerConfig(lr=LR, device=device, gradient_checkpointing=recompute)
    learner = LocalLearner(Decoder.read(folder), config, temperature=1.0)
    ids, masks = batch_of(case, learner.model.shape.vocab_size)
    written = np.array([sum(mask) for mask in masks])
    batch = TokenBatch(
        tokens=np.concatenate(ids),
        lengths=np.array([len(sequence) for sequence in ids]),
        index=np.flatnonzero(np.concatenate(masks)),
        trajectory=np.repeat(np.arange(len(ids)), written),
        trajectory_tokens=written,
        minibatch_tokens=int(written.sum()),
        minibatch_trajectories=len(ids),
    )

    def step() -> tuple[float, float]:
        metrics = learner.update([batch], SUPERVISED).metrics
        return metrics["loss"], metrics["grad_norm"]

    return step


def theirs(folder: Path, case: str, device: str, recompute: bool) -> Callable[[], tuple[float, float]]:
    """A step of transformers' model: a padded batch, all logits, autocast on CUDA."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, masks = batch_of(case, model.config.vocab_size)
    width = max(map(len, ids))
    tokens = torch.tensor([s + [0] * (width - len(s)) for s in ids], device=device)
    real = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in ids], device=device)
    policy = torch.tensor([m + [False] * (width - len(m)) for m in masks], device=device)[:, 1:]
    adamw = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)

    def step() -> tuple[float, float]:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(tokens, attention_mask=real, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits[policy].float(), dim=-1)  # of the policy's tokens only, as ours
        with torch.no_grad():
            (-(logprobs.exp() * logprobs).sum(-1)).mean().item()
        loss = -logprobs.gather(-1, tokens[:, 1:][policy].unsqueeze(-1)).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return loss.item(), norm.item()

    return step


def child(side: str, case: str, folder: Path, device: str, threads: int, seconds: float, recompute: bool) -> None:
    """Run one side for a while and print what it took."""
    torch.set_num_threads(threads)
    cuda = device == "cuda"
    step = {"ours": ours, "theirs": theirs}[side](folder, case, device, recompute)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    loss, norm = step()  # the first allocates, and makes the optimizer's moments
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 2:
        start = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": sorted(times)[len(times) // 2], "bytes": peak - (0 if cuda else before),
                      "loss": loss, "norm": norm}))  # fmt: skip


def run_child(side: str, case: str, folder: str, threads: int, arguments: argparse.Namespace) -> dict[str, float]:
    options = ["--device", arguments.device, "--seconds", str(arguments.seconds)]
    options += ["--recompute"] if arguments.recompute else []
    command = [sys.executable, __file__, *options, "--child", side, case, folder, str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{side} on {case} with {threads} thread(s) failed:\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(case: str, folder: str, arguments: argparse.Namespace) -> None:
    cores = len(os.sched_getaffinity(0))
    counts = sorted({1, cores}) if arguments.device == "cpu" else [cores]
    threads: dict[str, int] = {}
    runs: dict[str, list[dict[str, float]]] = {}
    for side in ("ours", "theirs"):  # the first round finds the better thread count
        first = {count: run_child(side, case, folder, count, arguments) for count in counts}
        threads[side] = min(counts, key=lambda count: first[count]["seconds"])
        runs[side] = [first[threads[side]]]
    for _ in range(arguments.rounds - 1):  # in turn, so that a busy moment of the machine hits both sides
        for side in runs:
            runs[side].append(run_child(side, case, folder, threads[side], arguments))
    medians = {side: sorted(found, key=lambda r: r["seconds"])[len(found) // 2] for side, found in runs.items()}
    mine, peer = medians["ours"], medians["theirs"]
    rough = 1e-3 if arguments.device == "cpu" else 3e-2
    for quantity in ("loss", "norm"):
        assert abs(mine[quantity] - peer[quantity]) <= rough * abs(peer[quantity]), (quantity, mine, peer)
    vocab = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    sequences, _ = batch_of(case, vocab)
    tokens = sum(map(len, sequences))
    longest = max(map(len, sequences))
    print(f"{case}: {len(sequences)} sequences, {tokens} tokens, longest {longest}; loss {mine['loss']:.4f}")
    for name, side in (("LocalLearner", "ours"), ("transformers", "theirs")):
        speed, size = tokens / medians[side]["seconds"], medians[side]["bytes"] / 2**20
        print(f"  {name:14s} {speed:10.0f} tokens/s {size:9.0f} MiB  {threads[side]} thread(s)")
    speed, memory = peer["seconds"] / mine["seconds"], peer["bytes"] / mine["bytes"]
    print(f"  ratio          {speed:10.2f} faster   {memory:9.2f} less memory", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each process")
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing on both sides")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["tiny", "middle"])
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        side, case, folder, threads = arguments.child
        child(side, case, Path(folder), arguments.device, int(threads), arguments.seconds, arguments.recompute)
        return
    for case in arguments.cases:
        if case == "tiny":
            compare(case, str(Path(next(iter(turnwise.__path__))) / "engines" / "bundled" / "tiny"), arguments)
            continue
        with tempfile.TemporaryDirectory() as folder:
            Decoder.fresh({"middle": MIDDLE, "large": LARGE}[case], 0).save(Path(folder))
            compare(case, folder, arguments)


if __name__ == "__main__":
    main()
