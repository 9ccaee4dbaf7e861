"""Supervised learning of scripted conversations, in plain torch."""

import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from transformers import Qwen3VLForConditionalGeneration

from turnwise.models.tiny_vision.demonstrations import BUCKETS, Arrays, Captions, Demonstrations, Taught
from turnwise.models.tiny_vision.network import run_text
from turnwise.models.tiny_vision.pretraining import in_order


def imitate(
    model: Qwen3VLForConditionalGeneration,
    shown: Demonstrations | Captions,
    *,
    name: str,
    lr: float,
    workers: int,
    say: Callable[[str], None],
) -> float:
    """Train the language model on the tokens of the assistant, with the tower as it is.

    Gives the share of them that it would have written too, at the last step.
    """
    device = next(model.parameters()).device
    learned = list(model.model.language_model.parameters())
    optimizer = torch.optim.AdamW(learned, lr, betas=(0.9, 0.98), weight_decay=0.01)
    steps = len(shown) * BUCKETS
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    began, right = time.monotonic(), 0.0
    for step, arrays in enumerate(_batches(shown, workers)):
        logits, wanted = _written(model, Taught.of(arrays, device))
        loss = F.cross_entropy(logits, wanted)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            right = float((logits.argmax(-1) == wanted).float().mean())
            took = time.monotonic() - began
            say(f"{name}: step {step} of {steps}, {took:.0f} s, loss {loss.item():.4f}, tokens right {right:.1%}")
    return right


def _batches(shown: Demonstrations | Captions, workers: int) -> Iterator[Arrays]:
    for bucket in in_order(shown, workers):
        yield from bucket


def _written(model: Qwen3VLForConditionalGeneration, batch: Taught) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits for every token that the assistant wrote, and these."""
    hidden = run_text(model, batch.token_ids, batch.images, batch.positions)
    learned = batch.learned[:, 1:]
    return model.lm_head(hidden[:, :-1][learned]), batch.token_ids[:, 1:][learned]
