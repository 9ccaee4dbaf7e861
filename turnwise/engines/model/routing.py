"""Which experts the routers of a mixture-of-experts model choose: noted in one pass, taken again in another."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnwise.errors import EngineError

Experts = NDArray[np.uint8] | NDArray[np.uint16]
"""[T, routers, k] numbers of experts; the largest number of the format stands for a choice that was not noted."""


@dataclass(frozen=True, slots=True)
class RouterShape:
    """One router: how many experts it has, how many of them a token goes to, and whether it gives their logits."""

    experts: int
    top_k: int
    logits: bool = True


@dataclass(slots=True, eq=False)
class Routing:
    """The choices of one pass: taken from `given` [T, routers, k] where there are any, and noted in `taken` [T, k] by
    the number of the router."""

    given: Tensor | None = None
    taken: dict[int, Tensor] = field(default_factory=dict)
    logits: dict[int, Tensor] = field(default_factory=dict)
    """[T, experts] by the number of the router, with gradient."""

    def choose(self, number: int, own: Tensor) -> Tensor:
        """The experts [T, k] that tokens go to, where the router's `own` choice is this."""
        chosen = own
        if self.given is not None:
            if len(self.given) != len(own):
                raise EngineError(f"experts are given for {len(self.given)} of {len(own)} tokens")
            given = self.given[:, number].to(own.dtype)
            chosen = torch.where(given == torch.iinfo(self.given.dtype).max, own, given)
        self.taken[number] = chosen
        return chosen

    def noted(self, dtype: torch.dtype) -> Tensor:
        """[T, routers, k] all that was chosen."""
        return torch.stack([self.taken[number] for number in range(len(self.taken))], dim=1).to(dtype)


def expert_dtype(routers: Sequence[RouterShape]) -> torch.dtype:
    """The smallest format that has a number for every expert and one more."""
    return torch.uint8 if max(router.experts for router in routers) < 256 else torch.uint16


def balance_loss(passes: Sequence[Routing]) -> Tensor:
    """How unevenly tokens go to experts, k where evenly, as the models of transformers measure it: over all tokens and
    routers, the share of tokens that go to an expert times its mean probability, summed and times the experts."""
    routers = [(routing.logits[number], chosen) for routing in passes for number, chosen in routing.taken.items()]
    rows, experts = sum(len(logits) for logits, _ in routers), routers[0][0].shape[-1]
    chances = torch.stack([torch.softmax(logits.float(), -1).sum(0) for logits, _ in routers]).sum(0)
    counts = torch.stack([torch.bincount(chosen.flatten(), minlength=experts) for _, chosen in routers]).sum(0)
    return experts * (counts / rows * (chances / rows)).sum()


def not_noted(tokens: int, like: Experts) -> Experts:
    """The choices of so many tokens of which nothing is known."""
    return np.full((tokens, *like.shape[1:]), np.iinfo(like.dtype).max, dtype=like.dtype)
