"""On a GPU: working weights, memory by plan, batches that do not fit, states, and the sampler's bits in training."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from turnwise.config import LearnerConfig
from turnwise.config.choices import Offload, OptimizerName
from turnwise.engines.learners.learner import SUPERVISED, Objective, TokenBatch, Who
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.huggingface_folder import DecoderConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SHAPE = DecoderConfig("llama", 8192, 256, 768, 8, 4, 2, 64, 4096, tied=True)
UNEVEN = [100, 37, 256, 64, 8, 190]
PPO = Objective("ppo_clip", entropy=0.01)


def learner_of(device: str = "cuda", invariant: bool = False, **given: Any) -> LocalLearner:
    own = {name: given.pop(name) for name in ("memory_bytes", "warn", "chunk_tokens", "reference") if name in given}
    config = LearnerConfig(**{"lr": 1e-3, "device": device, **given})
    return LocalLearner(Decoder.fresh(SHAPE, 1), config, temperature=0.9, invariant=invariant, **own)


def batch(lengths: list[int], seed: int = 0, part: slice = slice(None)) -> TokenBatch:
    """Of all sequences, or of some of them as a micro-batch of the same minibatch."""
    noise = np.random.default_rng(seed)
    tokens = [noise.integers(SHAPE.vocab_size, size=length) for length in lengths]
    advantages = [noise.normal(size=length).astype(np.float32) for length in lengths]
    kept = range(len(lengths))[part]
    masks = [np.arange(lengths[n]) >= max(1, lengths[n] // 3) for n in kept]
    counts = np.array([mask.sum() for mask in masks])
    chosen = np.concatenate(masks)
    total = sum(length - max(1, length // 3) for length in lengths)
    return TokenBatch(
        np.concatenate([tokens[n] for n in kept]), np.array([lengths[n] for n in kept]), np.flatnonzero(chosen),
        np.repeat(np.arange(len(kept)), counts), counts, total, len(lengths),
        advantages=np.concatenate([advantages[n] for n in kept])[chosen],
        old_logprobs=np.full(chosen.sum(), -9.0, dtype=np.float32),
    )  # fmt: skip


def gradient(learner: LocalLearner, given: TokenBatch) -> torch.Tensor:
    learner.accumulate(given, lambda found, here: (-found.logprobs.mean() - 0.1 * found.entropy.mean(), {}))
    found = learner._optimizers["policy"].gradients.total()
    return torch.cat([found[name].float().cpu().flatten() for name in sorted(found)])


@pytest.fixture
def little_memory() -> Iterator[None]:
    """A few hundred MiB beyond what is in use."""
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1000 * 2**20) / whole)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("lengths", [UNEVEN, [128] * 6], ids=["uneven", "equal"])
@pytest.mark.parametrize("recompute", [0, 3, 8])
def test_the_gradient_is_that_of_the_cpu(lengths: list[int], recompute: int) -> None:
    expected = gradient(learner_of("cpu"), batch(lengths))
    learner = learner_of()
    learner._memory.recompute = recompute
    found = gradient(learner, batch(lengths))
    assert type(learner.model).__name__ == "FusedDecoder"
    assert {p.dtype for p in learner.model.parameters()} == {torch.bfloat16}
    cosine = functional.cosine_similarity(found, expected, dim=0).item()
    assert cosine > 0.995, f"cosine {cosine}, norms {found.norm():.4f} and {expected.norm():.4f}"
    assert found.norm().item() == pytest.approx(expected.norm().item(), rel=0.02)


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "offload"])
def test_every_optimizer_learns_and_goes_on_from_its_state(kind: str, tmp_path: Path) -> None:
    knobs = {
        "adamw8bit": {"optimizer": OptimizerName.adamw8bit}, "offload": {"offload": Offload.optimizer}
    }.get(kind, {})  # fmt: skip
    learner, other = learner_of(**knobs), learner_of(**knobs)
    losses = [learner.update([batch(UNEVEN)], SUPERVISED).metrics["loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5, losses
    learner.save(tmp_path)
    other.load(tmp_path)
    kept, found = learner.state()[0], other.state()[0]
    assert kept.keys() == found.keys()
    assert [name for name in kept if not torch.equal(kept[name].cpu(), found[name].cpu())] == []
    pairs = zip(learner.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    after = [one.update([batch(UNEVEN)], SUPERVISED).metrics for one in (learner, other)]
    assert after[0] == pytest.approx(after[1], rel=1e-2)
    home = {tensor.device.type for name, tensor in learner.state()[0].items() if "exp_avg" in name}
    assert home == {"cpu" if kind == "offload" else "cuda"}


def test_a_pass_of_the_budget_stays_below_the_planned_memory() -> None:
    allowed = 3 * 2**30
    learner = learner_of(memory_bytes=allowed)
    length = 512
    for _ in range(2):  # the second with what the first measured
        budget = learner.token_budget
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        learner.update([batch([length] * (budget // length))], PPO)
        used = torch.cuda.max_memory_allocated() - before
        moments = 16 * sum(p.numel() for p in learner.model.parameters())  # of the first step, and its wide gradients
        assert used <= allowed + moments, f"{used / 2**20:.0f} MiB at {budget} tokens, allowed {allowed / 2**20:.0f}"


def test_a_batch_that_does_not_fit_is_halved(little_memory: None) -> None:
    said: list[str] = []
    lengths = [256] * 256
    free = learner_of(chunk_tokens=1024, warn=lambda text: None)
    tight = learner_of(chunk_tokens=1024, warn=said.append)
    parts = [batch(lengths, part=slice(n, n + 16)) for n in range(0, 256, 16)]
    expected = free.update(parts, PPO)
    found = tight.update([batch(lengths)], PPO)
    assert said and "does not fit" in said[0], "the memory was enough: lower what the fixture leaves"
    assert found.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=0.02)
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=0.02, abs=1e-3)
    together = np.concatenate([part.logprobs for part in expected.outputs])
    assert np.abs(found.outputs[0].logprobs - together).mean() < 0.01
    assert tight.token_budget < sum(lengths)


def test_invariant_training_has_the_bits_of_each_sequence_alone() -> None:
    learner = learner_of(invariant=True)
    given = batch(UNEVEN)
    together = learner.score(given, Who.SAMPLER)
    alone = [learner.score(batch(UNEVEN, part=slice(n, n + 1)), Who.SAMPLER) for n in range(len(UNEVEN))]
    assert np.array_equal(together, np.concatenate(alone)), np.abs(together - np.concatenate(alone)).max()
    computed = learner.update([given], PPO).outputs[0].logprobs
    assert np.array_equal(computed, together), np.abs(computed - together).max()
    fast = learner_of().score(given, Who.POLICY)
    assert np.abs(fast - together).mean() < 0.01


def test_an_update_waits_for_the_device_a_few_times_only() -> None:
    learner = learner_of()
    parts = [batch(UNEVEN, part=slice(n, n + 2)) for n in range(0, 6, 2)]
    learner.update(parts, PPO)
    torch.cuda.synchronize()
    with pytest.warns(UserWarning) as said:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            learner.update(parts, PPO)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [f"{w.filename}:{w.lineno}" for w in said if "synchroniz" in str(w.message).lower()]
    assert 1 <= len(waits) <= 4, waits
