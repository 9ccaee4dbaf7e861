"""What a learner is: arrays in, arrays out, nothing shared with the caller, so that it can live in another process."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from turnwise.config import AlgorithmConfig
from turnwise.config.choices import Aggregation, KLEstimator
from turnwise.engines.model.routing import Experts
from turnwise.engines.weight_updates import FullWeights, StoredWeights
from turnwise.errors import TurnwiseError
from turnwise.ledger import MediaSpan

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """One micro-batch: S sequences of T tokens end to end, N of which the policy wrote, in K trajectories.

    `trajectory_tokens`, `minibatch_tokens` and `minibatch_trajectories` count the whole minibatch, so that the
    gradients of its micro-batches add up to the gradient of one big batch. An array is None when its sequences have
    none.
    """

    tokens: Ints
    """[T] token ids."""
    lengths: Ints
    """[S] tokens of each sequence."""
    index: Ints
    """[N] position of each policy token among the T."""
    trajectory: Ints
    """[N] which of the K trajectories a policy token belongs to."""
    trajectory_tokens: Ints
    """[K] policy tokens of each trajectory, those of its segments in other micro-batches included."""
    minibatch_tokens: int
    """Policy tokens of the whole minibatch."""
    minibatch_trajectories: int
    """[N], as are those below."""
    old_logprobs: Floats | None = None
    ref_logprobs: Floats | None = None
    values: Floats | None = None
    advantages: Floats | None = None
    returns: Floats | None = None
    weights: Floats | None = None
    media: tuple[MediaSpan, ...] = ()
    """The images of all sequences, each at its place among the T; a block never crosses from one to the next."""
    experts: Experts | None = None
    """[T, routers, k] those that tokens take where the policy computes them; None leaves it to its routers."""


class Supervised(enum.StrEnum):
    """The losses of supervised fine-tuning, which need no reward."""

    NLL = "nll"
    """The negative log-likelihood of the policy's tokens: supervised fine-tuning."""


@dataclass(frozen=True, slots=True)
class Objective:
    """`Objective(loss="ppo_clip", aggregation=Aggregation.token_mean)`; `losses.evaluate` makes numbers of it.

    `loss` is a `PolicyLoss`, one of `Supervised`, or the user's `module:function` or `file.py:function`. The fields
    mean what the knobs of `algorithm` with these names mean.
    """

    loss: str
    aggregation: Aggregation = Aggregation.token_mean
    aggregation_length: int = 1024
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = 3.0
    entropy: float = 0.0
    kl_loss: float = 0.0
    kl_loss_estimator: KLEstimator = KLEstimator.k3
    value_loss: float = 1.0
    value_clip: float | None = 0.5

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> "Objective":
        """The objective that the config's algorithm describes."""
        return cls(
            loss=algorithm.loss,
            aggregation=algorithm.aggregation,
            aggregation_length=algorithm.aggregation_length,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            clip_dual=algorithm.clip_dual,
            entropy=algorithm.entropy,
            kl_loss=algorithm.kl_loss,
            kl_loss_estimator=algorithm.kl_loss_estimator,
            value_loss=algorithm.value_loss,
            value_clip=algorithm.value_clip,
        )


SUPERVISED = Objective(loss=Supervised.NLL.value)


class NotFinite(TurnwiseError):
    """A loss or a gradient is NaN or infinite; no weight has changed and the gradients so far are dropped."""


class Who(enum.StrEnum):
    """The model whose scores of a batch are wanted."""

    POLICY = "policy"
    """Log-probs of the policy as it is now."""
    REFERENCE = "reference"
    """Log-probs of the policy as it started."""
    CRITIC = "critic"
    """Values of the states before the tokens."""
    SAMPLER = "sampler"
    """Log-probs of the policy by the sampler's own arithmetic: the same bits, where that is proven to be possible."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenOutputs:
    """What the policy said of the N policy tokens of one batch before this update changed it."""

    logprobs: Floats
    entropies: Floats


@dataclass(frozen=True, slots=True, eq=False)
class UpdateResult:
    """One weight update: what was computed batch by batch, and its metrics."""

    outputs: list[TokenOutputs]
    metrics: dict[str, float]
    """The objective's own, `loss`, `grad_norm` and `lr`, and with a critic `critic_grad_norm` and `critic_lr`."""


class Learner(Protocol):
    """Trains a policy. Batches hold numpy arrays and objectives are data: both can be sent to another process."""

    @property
    def step(self) -> int:
        """How many times the weights have changed."""
        ...

    @property
    def token_budget(self) -> int:
        """Tokens of one pass that it has room for, which may change from update to update."""
        ...

    def score(self, batch: TokenBatch, who: Who) -> Floats:
        """One number [N] for every policy token, without gradient."""
        ...

    def update(self, batches: Sequence[TokenBatch], objective: Objective) -> UpdateResult:
        """One optimizer step on the micro-batches of a minibatch.

        NotFinite when the loss or a gradient is not; no weight has changed then.
        """
        ...

    def weights(self) -> FullWeights | StoredWeights:
        """The policy's weights by their Hugging Face names, an adapter merged; read them before the next update."""
        ...

    def save(self, folder: Path) -> None:
        """Everything needed to go on from here: weights that are trained, optimizer, counters.

        What it is, is settled when this returns; it may still be written then, see `saving`.
        """
        ...

    @property
    def saving(self) -> bool:
        """Whether the last `save` still writes; scores and updates may go on meanwhile."""
        ...

    def saved(self) -> None:
        """Wait until the last `save` is written; raises why it was not."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from a saved state; one of another model is refused by name before anything changes."""
        ...

    def save_policy(self, folder: Path) -> None:
        """The policy as others load it: `policy/`, and `policy_adapter/` when it has an adapter."""
        ...

    def save_adapter(self, folder: Path) -> bool:
        """The adapter alone, in peft's format; False where there is none, and nothing is written."""
        ...

    def close(self) -> None:
        """End what it runs elsewhere; it is not used again."""
        ...
