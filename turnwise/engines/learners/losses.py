"""Advantages to gradients: policy losses, their aggregation, the entropy bonus, the KL loss and the value loss.

Everything here is a function of the N policy tokens of a packed batch, so no other token can have a gradient. Sums are
divided by the counts of the whole minibatch: scalars, gradients and metrics of its micro-batches are shares that are to
be *added* to give the minibatch's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.config.choices import Aggregation, PolicyLoss
from turnwise.config.knobs import is_plugin
from turnwise.engines.learners import custom_loss, kl_estimates
from turnwise.engines.learners.device_batch import DeviceBatch
from turnwise.engines.learners.learner import Objective, Supervised
from turnwise.errors import ConfigError

MEANS = ("actor/entropy", "actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower")
"""Metrics that describe tokens; they are means over the tokens that were computed."""
Metrics = dict[str, Tensor]
"""Numbers that stay on their device until the update is done."""


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """What the learner computed for the N policy tokens of a packed batch, on the learner's device."""

    logprobs: Tensor
    """[N] with gradient, at the sampling temperature."""
    entropy: Tensor
    """[N] with gradient; backward pays for it only when the loss uses it."""
    values: Tensor | None
    """[N] with gradient when there is a critic, of the state before each token."""


def evaluate(tokens: PolicyTokens, batch: DeviceBatch, objective: Objective) -> tuple[Tensor, Metrics]:
    """The scalar to differentiate, and this batch's shares of the minibatch's metrics."""
    if objective.loss == Supervised.NLL:
        return supervised(tokens.logprobs, batch, objective), {}
    total, metrics = policy_objective(tokens.logprobs, tokens.entropy, batch, objective)
    if tokens.values is None:
        return total, metrics
    value_loss, more = value_objective(tokens.values, batch, objective.value_clip)
    return total + objective.value_loss * value_loss, metrics | more


def supervised(logprobs: Tensor, batch: DeviceBatch, objective: Objective) -> Tensor:
    """The negative log-likelihood of the policy's tokens, each times its weight where there are any."""
    _check_aligned(batch, logprobs=logprobs)
    losses = -logprobs if batch.weights is None else -logprobs * batch.weights
    return aggregate(losses, batch, objective.aggregation, objective.aggregation_length)


def aggregate(losses: Tensor, batch: DeviceBatch, aggregation: Aggregation, norm_length: int) -> Tensor:
    """This batch's share of its minibatch's aggregated loss; `norm_length` is the constant of sequence_sum_norm."""
    match aggregation:
        case Aggregation.token_mean:
            return losses.sum() / batch.minibatch_tokens
        case Aggregation.sequence_mean_token_sum:
            return losses.sum() / batch.minibatch_trajectories
        case Aggregation.sequence_mean_token_mean:
            return (batch.trajectory_sums(losses) / batch.trajectory_tokens).sum() / batch.minibatch_trajectories
        case Aggregation.sequence_sum_norm:
            return losses.sum() / norm_length / batch.minibatch_trajectories


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A policy loss per token, with 1.0 where a bound decided it."""

    loss: Tensor
    clipped: Tensor
    clipped_lower: Tensor


def ppo_clip(
    logprobs: Tensor, old: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLoss:
    """PPO's pessimistic surrogate with separate bounds, and dual clip for negative advantages."""
    return _surrogate(_log_ratio(logprobs, old).exp(), advantages, clip_low, clip_high, dual_clip)


def gspo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, batch: DeviceBatch, clip_low: float, clip_high: float
) -> TokenLoss:
    """PPO's surrogate with the geometric mean of a trajectory's ratios in place of each.

    Every token carries its trajectory's ratio as value and its own logprob as gradient: the trajectory's gradient is
    the same as that of the geometric mean, and advantages or weights may still differ by token. A batch must hold all
    segments of its trajectories.
    """
    log_ratio = (logprobs - old).detach()
    if not batch.whole_trajectories:
        raise ValueError("gspo needs all segments of a trajectory in one batch: fill(..., together=True)")
    mean = (batch.trajectory_sums(log_ratio) / batch.trajectory_tokens)[batch.trajectory]
    mean = mean.clamp(-kl_estimates.LOG_RATIO_LIMIT, kl_estimates.LOG_RATIO_LIMIT)
    # The difference comes first: it is exactly zero, so the value is the mean to the last digit.
    return _surrogate(((logprobs - logprobs.detach()) + mean).exp(), advantages, clip_low, clip_high, None)


def cispo(logprobs: Tensor, old: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    """A policy gradient whose importance weight is clipped and has no gradient of its own."""
    ratio = _log_ratio(logprobs, old).exp().detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLoss(-weight * advantages * logprobs, (ratio != weight).float(), torch.zeros_like(ratio))


def reinforce(logprobs: Tensor, advantages: Tensor) -> TokenLoss:
    """The loss of the plain policy gradient: -advantage * log-prob."""
    none = torch.zeros_like(advantages)
    return TokenLoss(-advantages * logprobs, none, none)


def _log_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    return (logprobs - old).clamp(-kl_estimates.LOG_RATIO_LIMIT, kl_estimates.LOG_RATIO_LIMIT)


def _surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLoss:
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, bounded)
    lower = torch.zeros_like(loss, dtype=torch.bool)
    if dual_clip is not None:
        most = -advantages * dual_clip
        lower = (advantages < 0) & (loss > most)
        loss = torch.where(advantages < 0, torch.minimum(loss, most), loss)
    return TokenLoss(loss, (bounded > plain).float().detach(), lower.float())


def policy_objective(
    logprobs: Tensor, entropy: Tensor, batch: DeviceBatch, objective: Objective
) -> tuple[Tensor, Metrics]:
    """The scalar to differentiate, and this batch's shares of the minibatch's metrics.

    `logprobs` and `entropy` are the learner's at the N policy tokens. Importance weights multiply the policy loss only;
    a rejected token still counts in the denominators, so that rejecting makes a step smaller and never louder.
    """
    _check_aligned(batch, logprobs=logprobs, entropy=entropy)
    token_loss = _token_loss(logprobs, batch, objective)
    weighted = token_loss.loss if batch.weights is None else token_loss.loss * batch.weights

    def share(losses: Tensor) -> Tensor:
        return aggregate(losses, batch, objective.aggregation, objective.aggregation_length)

    pg_loss = share(weighted)
    total = pg_loss
    metrics = {
        "actor/pg_loss": pg_loss.detach(),
        "actor/pg_clipfrac": _mean(token_loss.clipped, batch),
        "actor/entropy": _mean(entropy, batch),
    }
    if objective.clip_dual is not None:
        metrics["actor/pg_clipfrac_lower"] = _mean(token_loss.clipped_lower, batch)
    if batch.old_logprobs is not None:
        metrics["actor/ppo_kl"] = _mean(-_log_ratio(logprobs.detach(), batch.old_logprobs), batch)
    if objective.entropy:
        total = total - objective.entropy * share(entropy)
    if objective.kl_loss:
        if batch.ref_logprobs is None:
            raise ConfigError("a KL loss needs a reference policy: the batch has no ref_logprobs")
        kl_loss = share(kl_estimates.estimate(logprobs, batch.ref_logprobs, objective.kl_loss_estimator))
        total = total + objective.kl_loss * kl_loss
        metrics["actor/kl_loss"] = kl_loss.detach()
    return total, metrics


def _token_loss(logprobs: Tensor, batch: DeviceBatch, objective: Objective) -> TokenLoss:
    if batch.advantages is None:
        raise ValueError("the batch has no advantages: advantages.assign writes them")
    loss = None if is_plugin(objective.loss) else PolicyLoss(objective.loss)
    if loss is PolicyLoss.reinforce:
        return reinforce(logprobs, batch.advantages)
    if batch.old_logprobs is None:
        raise ValueError(f"{objective.loss} needs old_logprobs, the learner's from before the step's first update")
    old, advantages, low, high = batch.old_logprobs, batch.advantages, objective.clip_low, objective.clip_high
    match loss:
        case None:
            loss_batch = custom_loss.LossBatch(logprobs, old, advantages, batch.trajectory)
            zeros = torch.zeros_like(advantages)
            return TokenLoss(custom_loss.losses(objective.loss, loss_batch), zeros, zeros)
        case PolicyLoss.ppo_clip:
            return ppo_clip(logprobs, old, advantages, low, high, objective.clip_dual)
        case PolicyLoss.gspo:
            return gspo(logprobs, old, advantages, batch, low, high)
        case PolicyLoss.cispo:
            return cispo(logprobs, old, advantages, low, high)


def value_objective(values: Tensor, batch: DeviceBatch, clip: float | None) -> tuple[Tensor, Metrics]:
    """Half the squared error to the returns, mean over the tokens; metrics are shares to be added.

    A value further than `clip` from the old one is pulled back, and the worse of both errors counts.
    """
    _check_aligned(batch, values=values)
    if batch.returns is None:
        raise ConfigError("a critic learns from token-level returns: use gae, the batch has none")
    error = (values - batch.returns).square()
    clipped = torch.zeros_like(error)
    if clip is not None:
        if batch.values is None:
            raise ValueError("value clipping needs the values from before the step's first update")
        pulled = values.clamp(batch.values - clip, batch.values + clip)
        pulled_error = (pulled - batch.returns).square()
        clipped = (pulled_error > error).float().detach()
        error = torch.maximum(error, pulled_error)
    loss = 0.5 * error.sum() / batch.minibatch_tokens
    metrics = {
        "critic/vf_loss": loss.detach(),
        "critic/vf_clipfrac": _mean(clipped, batch),
        "critic/vpred_mean": _mean(values, batch),
    }
    return loss, metrics


def _check_aligned(batch: DeviceBatch, **found: Tensor) -> None:
    for name, values in found.items():
        if values.shape != batch.index.shape:
            raise ValueError(f"{tuple(values.shape)} {name} for {len(batch.index)} policy tokens")


def _mean(values: Tensor, batch: DeviceBatch) -> Tensor:
    """This batch's share of the mean over the minibatch's policy tokens."""
    return values.detach().sum() / batch.minibatch_tokens
