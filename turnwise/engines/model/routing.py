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
    """One router: how many experts it has, and how many of them a token goes to."""

    experts: int
    top_k: int


@dataclass(slots=True, eq=False)
class Routing:
    """The choices of one pass: taken from `given` [T, routers, k] where there are any, and noted in `taken` [T, k] by
    the number of the router."""

    given: Tensor | None = None
    taken: dict[int, Tensor] = field(default_factory=dict)

    def choose(self, number: int, own: Tensor) -> Tensor:
        """The experts [T, k] that tokens go to, where the router's `own` choice is this."""
        if self.given is None:
            self.taken[number] = own
            return own
        if len(self.given) != len(own):
            raise EngineError(f"experts are given for {len(self.given)} of {len(own)} tokens")
        unknown = torch.iinfo(self.given.dtype).max
        given = self.given[:, number].to(own.dtype)
        return torch.where(given == unknown, own, given)

    def noted(self, dtype: torch.dtype) -> Tensor:
        """[T, routers, k] all that was chosen."""
        return torch.stack([self.taken[number] for number in range(len(self.taken))], dim=1).to(dtype)


def expert_dtype(routers: Sequence[RouterShape]) -> torch.dtype:
    """The smallest format that has a number for every expert and one more."""
    return torch.uint8 if max(router.experts for router in routers) < 256 else torch.uint16


def not_noted(tokens: int, like: Experts) -> Experts:
    """The choices of so many tokens of which nothing is known."""
    return np.full((tokens, *like.shape[1:]), np.iinfo(like.dtype).max, dtype=like.dtype)
