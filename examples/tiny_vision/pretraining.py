"""Pretraining of the vision tower: it learns to name what stands in every patch of a sketch."""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from network import GRID, MERGE, TOKENS, look
from numpy.typing import NDArray
from sketches import FINE, GLYPHS, INKS, looks
from torch.utils.data import DataLoader, Dataset
from transformers import Qwen3VLForConditionalGeneration

Item = TypeVar("Item")
LOOKS = 8
"""Images of one sketch."""
EMPTY = 0.1
"""What a cell with nothing in it counts, of which there are many."""
SAID = ("glyphs", "colours", "digits of marks", "places")
GLYPH_CELLS, INK_CELLS = MERGE * MERGE, (FINE * MERGE // GRID) ** 2


class Sketches(Dataset[tuple[NDArray[Any], ...]]):
    """Batches by number, so that they are the same whoever makes them."""

    def __init__(self, seed: int, steps: int, batch: int) -> None:
        self.seed, self.steps, self.batch = seed, steps, batch

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> tuple[NDArray[Any], ...]:
        if index >= self.steps:
            raise IndexError(index)
        rng = random.Random(f"sketches/{self.seed}/{index}")
        views = [view for _ in range(self.batch // LOOKS) for view in looks(rng, LOOKS)]
        parts = [(view.pixels, view.glyphs, view.inks, view.beside) for view in views]
        return tuple(np.stack(part) for part in zip(*parts, strict=True))


def in_order(dataset: Dataset[Item], workers: int) -> Iterator[Item]:
    """Every item, made ahead by other processes. They come as arrays: tensors would need shared memory."""
    yield from DataLoader(dataset, batch_size=None, num_workers=workers, collate_fn=_no_collate)


def _no_collate(item: Item) -> Item:
    return item


def pretrain_tower(
    model: Qwen3VLForConditionalGeneration,
    *,
    seed: int,
    steps: int,
    batch: int,
    lr: float,
    workers: int,
    say: Callable[[str], None],
) -> float:
    """Train the tower, and heads, not kept, that say what its features tell of each cell and of their own place.

    Without the last a language model would not know where on the image a token lies. Gives the worst last accuracy.
    """
    device = next(model.parameters()).device
    width = model.config.text_config.hidden_size
    torch.manual_seed(seed)
    heads = torch.nn.ModuleList(
        torch.nn.Linear(width, cells * classes)
        for cells, classes in (
            (GLYPH_CELLS, len(GLYPHS)), (INK_CELLS, len(INKS)), (INK_CELLS, len(GLYPHS)), (1, 1 + TOKENS),
        )
    ).to(device)  # fmt: skip
    places = 1 + torch.arange(TOKENS, device=device).view(1, TOKENS, 1)  # zero is for what is not there
    learned = [*model.model.visual.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(learned, lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    rates = [0.0]
    began = time.monotonic()
    for step, arrays in enumerate(in_order(Sketches(seed, steps, batch), workers)):
        images, *labels = (torch.from_numpy(part).to(device) for part in arrays)
        features, deep = look(model, images)
        labels.append(places.expand(len(images), -1, -1))
        predictions = [_said(heads, part, labels) for part in (features, *deep)]
        loss = torch.stack(
            [_loss(*pair) for prediction in predictions for pair in zip(prediction, labels, strict=True)]
        ).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            rates = [_found(*pair) for pair in zip(predictions[0], labels, strict=True)]
            accuracies = ", ".join(f"{name} {rate:.1%}" for name, rate in zip(SAID, rates, strict=True))
            say(f"vision: step {step}/{steps}, {time.monotonic() - began:.0f} s, loss {loss.item():.4f}, {accuracies}")
    return min(rates)


def _said(heads: torch.nn.ModuleList, features: torch.Tensor, labels: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits by cell and class, of each head."""
    return [head(features).unflatten(-1, (label.shape[-1], -1)) for head, label in zip(heads, labels, strict=True)]


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    weights = torch.ones(logits.shape[-1], device=logits.device)
    weights[0] = EMPTY
    return F.cross_entropy(logits.flatten(0, 2), labels.flatten(), weights)


@torch.no_grad()
def _found(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """How many of the things that are there are named rightly."""
    there = labels > 0
    return float((logits.argmax(-1) == labels)[there].float().mean())
