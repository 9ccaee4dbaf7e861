"""Tokens per second and peak memory of one training step on a GPU, over plain transformers in bfloat16.

Both sides do the same work in one run, from the same random weights of the SmolLM2-135M shape: forward, log-probs and
entropies of the policy's tokens, backward, and a step of AdamW; 256 of 384 tokens are the policy's. The peer pads its
batch and makes the logits of every token with sdpa attention, weights and moments in bfloat16. Tokens are real ones,
padding is not counted.

    python benchmarks/gpu_learner.py [--steps 10] [--sequences 64] [--length 384] [--sides ours theirs ...] [--profile]
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from turnwise.config import LearnerConfig
from turnwise.config.choices import Offload, OptimizerName
from turnwise.engines.learners.learner import SUPERVISED, TokenBatch
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.huggingface_folder import DecoderConfig, RopeConfig

SHAPE = DecoderConfig(
    "llama", 49_152, 576, 1536, 30, 9, 3, 64, 8192, norm_eps=1e-5, rope=RopeConfig(theta=100_000.0), tied=True
)
LR = 1e-5
Step = Callable[[], tuple[float, float]]
"""Takes one step; returns loss and gradient norm."""


@dataclass(frozen=True)
class Work:
    """Sequences and which of their tokens are the policy's."""

    tokens: list[np.ndarray]
    written: list[np.ndarray]

    @classmethod
    def make(cls, count: int, length: int, *, uneven: bool) -> "Work":
        """A third of each is prompt; uneven ones are from a quarter of the length up."""
        noise = np.random.default_rng(0)
        lengths = noise.integers(length // 4, length + 1, size=count) if uneven else np.full(count, length)
        tokens = [noise.integers(SHAPE.vocab_size, size=n) for n in lengths]
        return cls(tokens, [np.arange(n) >= n // 3 for n in lengths])

    @property
    def total(self) -> int:
        """Tokens in all."""
        return sum(map(len, self.tokens))

    def batch(self) -> TokenBatch:
        """As a learner takes it."""
        counts = np.array([mask.sum() for mask in self.written])
        return TokenBatch(
            tokens=np.concatenate(self.tokens),
            lengths=np.array([len(one) for one in self.tokens]),
            index=np.flatnonzero(np.concatenate(self.written)),
            trajectory=np.repeat(np.arange(len(counts)), counts),
            trajectory_tokens=counts,
            minibatch_tokens=int(counts.sum()),
            minibatch_trajectories=len(counts),
        )


def ours(folder: Path, work: Work, *, invariant: bool = False, **knobs: Any) -> Step:
    """A step of the learner as `turnwise train` takes it."""
    config = LearnerConfig(lr=LR, device="cuda", **knobs)
    learner = LocalLearner(Decoder.read(folder), config, temperature=1.0, invariant=invariant)
    batch = work.batch()

    def step() -> tuple[float, float]:
        metrics = learner.update([batch], SUPERVISED).metrics
        return metrics["loss"], metrics["grad_norm"]

    return step


def theirs(folder: Path, work: Work) -> Step:
    """A step of transformers' model."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model = model.to("cuda").train()
    width = max(map(len, work.tokens))
    rows = [np.pad(one, (0, width - len(one))) for one in work.tokens]
    tokens = torch.tensor(np.stack(rows), device="cuda")
    real = torch.tensor([[1] * len(one) + [0] * (width - len(one)) for one in work.tokens], device="cuda")
    mask = None if bool(real.all()) else real
    policy = torch.tensor(np.stack([np.pad(one, (0, width - len(one))) for one in work.written]), device="cuda")[:, 1:]
    adamw = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)

    def step() -> tuple[float, float]:
        logits = model(tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits[policy].float(), dim=-1)
        with torch.no_grad():
            (-(logprobs.exp() * logprobs).sum(-1)).mean().item()
        loss = -logprobs.gather(-1, tokens[:, 1:][policy].unsqueeze(-1)).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return loss.item(), norm.item()

    return step


SIDES: dict[str, Callable[[Path, Work], Step]] = {
    "theirs": theirs,
    "ours": ours,
    "ours, invariant": lambda folder, work: ours(folder, work, invariant=True),
    "ours, recomputed": lambda folder, work: ours(folder, work, gradient_checkpointing=True),
    "ours, adamw8bit": lambda folder, work: ours(folder, work, optimizer=OptimizerName.adamw8bit),
    "ours, offload": lambda folder, work: ours(folder, work, offload=Offload.optimizer),
}


def profile(step: Step) -> None:
    """Where the time of one step goes, on the GPU and on the host."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    for by in ("self_device_time_total", "self_cpu_time_total"):
        print(found.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=60))


def measure(make: Callable[[], Step], steps: int, profiled: bool) -> tuple[float, float, float, float, float]:
    """Seconds of a step, peak bytes, loss and gradient norm of the first step, and seconds until three were done."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    step = make()
    loss, norm = step()
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    warm = time.perf_counter() - begun
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    if profiled:
        profile(step)
    return float(np.median(times)), torch.cuda.max_memory_allocated(), loss, norm, warm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=384)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--cases", nargs="+", choices=("equal", "uneven"), default=["equal", "uneven"])
    parser.add_argument("--profile", action="store_true", help="print which kernels and calls a step consists of")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: this benchmark needs a CUDA GPU")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        Decoder.fresh(SHAPE, 0).save(Path(folder))
        for case in arguments.cases:
            work = Work.make(arguments.sequences, arguments.length, uneven=case == "uneven")
            print(f"{case}: {len(work.tokens)} sequences, {work.total} tokens")
            peer: tuple[float, ...] | None = None
            for side in arguments.sides:
                try:
                    found = measure(
                        lambda side=side, work=work: SIDES[side](Path(folder), work), arguments.steps, arguments.profile
                    )
                except Exception as error:  # one side that fails must not cost the others their run
                    print(f"  {side:18s} failed: {type(error).__name__}: {error}", flush=True)
                    continue
                seconds, peak, loss, norm, warm = found
                peer = found if side == "theirs" else peer
                ratio = "" if peer is None else f"  {peer[0] / seconds:5.2f}x"
                print(
                    f"  {side:18s} {work.total / seconds:10,.0f} tokens/s {peak / 2**30:7.1f} GiB{ratio}  "
                    f"loss {loss:.4f}  norm {norm:.4f}  warm after {warm:.1f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
