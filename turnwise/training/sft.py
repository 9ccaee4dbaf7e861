"""Supervised fine-tuning: next-token loss on the policy's tokens of recorded trajectories, and on no others."""

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from turnwise.config import SftConfig
from turnwise.engines.model import attention
from turnwise.engines.model.policy_model import ModelInputs, PolicyModel
from turnwise.errors import DataError, TurnwiseError
from turnwise.training.sequences import TrainSequence, batches


@dataclass(frozen=True, slots=True)
class SftStep:
    """One weight update, counted from 1."""

    number: int
    loss: float
    lr: float
    grad_norm: float
    """Before it is clipped."""
    tokens: int
    """Of the batch."""
    policy_tokens: int
    """Among them, those that were learned."""
    seconds: float

    def metrics(self) -> dict[str, float]:
        """As metrics.jsonl has them."""
        return {
            "sft/loss": self.loss,
            "sft/lr": self.lr,
            "sft/grad_norm": self.grad_norm,
            "sft/policy_tokens": self.policy_tokens,
            "perf/total_num_tokens": self.tokens,
            "timing_s/step": self.seconds,
        }


def loss_on(decoder: PolicyModel, batch: list[TrainSequence]) -> Tensor:
    """Mean negative log-likelihood of the policy's tokens, each given everything before it."""
    lengths = [len(sequence.token_ids) for sequence in batch]
    tokens = torch.from_numpy(np.concatenate([sequence.token_ids for sequence in batch]))
    targets = torch.from_numpy(np.flatnonzero(np.concatenate([sequence.loss_mask for sequence in batch])))
    hidden = decoder(ModelInputs(tokens, attention.positions(lengths)), attention.packed(lengths))
    # A sequence starts with its prompt, so the token before a policy token is always in the same sequence.
    logits = decoder.logits(hidden[targets - 1])
    return functional.cross_entropy(logits, tokens[targets])


def train_sft(
    decoder: PolicyModel,
    sequences: list[TrainSequence],
    config: SftConfig,
    seed: int,
    report: Callable[[SftStep], None],
) -> float:
    """Train in place for `config.steps` steps and report each; returns how often the data was gone through.

    A loss that is not finite stops the run.
    """
    if not sequences:
        raise DataError("no sequence with policy tokens to train on")
    if any(sequence.loss_mask[0] for sequence in sequences):
        raise DataError("a sequence starts with a policy token: there is nothing to predict it from")
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _scale(step, config))
    seen = 0
    for step, batch in enumerate(itertools.islice(_endless(sequences, config.batch_tokens, seed), config.steps)):
        started, lr = time.perf_counter(), optimizer.param_groups[0]["lr"]
        loss = loss_on(decoder, batch)
        if not math.isfinite(loss.item()):
            raise TurnwiseError(f"the loss became {loss.item()} at step {step + 1}; lower sft.lr")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        seen += len(batch)
        tokens, learned = sum(len(s.token_ids) for s in batch), sum(s.policy_tokens for s in batch)
        report(SftStep(step + 1, loss.item(), lr, norm.item(), tokens, learned, time.perf_counter() - started))
    return seen / len(sequences)


def _scale(step: int, config: SftConfig) -> float:
    """Linear warm-up, then cosine decay to a tenth."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


def _endless(sequences: list[TrainSequence], token_budget: int, seed: int) -> Iterator[list[TrainSequence]]:
    for epoch in itertools.count():
        order = list(range(len(sequences)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        yield from batches(sequences, order, token_budget)
