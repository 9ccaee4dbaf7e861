"""What a learner minimises, as data: the name of a loss, its coefficients and how tokens become one number."""

import enum
from dataclasses import dataclass

from turnwise.config import AlgorithmConfig
from turnwise.config.choices import Aggregation, KLEstimator


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
