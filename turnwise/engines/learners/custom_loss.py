"""A user's own policy loss, `module:function` or `file.py:function`: its contract, and a try-out at the start."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from turnwise.errors import PluginError
from turnwise.system.plugins import call_with, load_function

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossBatch:
    """What a policy loss is computed from: N policy tokens, of all segments of their episodes.

    The function returns N losses that are differentiable by `logprobs`. `algorithm.aggregation` makes one number of
    them, importance weights, entropy bonus and KL loss come on top.
    """

    logprobs: "Tensor"
    """(N) The learner's log-probs now, with gradient."""
    old_logprobs: "Tensor"
    """(N) From before the step's first update (`algorithm.old_logprobs`)."""
    advantages: "Tensor"
    """(N)"""
    episodes: "Tensor"
    """(N) Tokens with the same number are of one episode."""


def losses(name: str, batch: LossBatch) -> "Tensor":
    """What the user's function makes of a batch: one finite loss for each token, with a gradient."""
    import torch

    where = f"loss {name!r}"
    loss = call_with(load_function(name, "loss"), batch, where)
    if not isinstance(loss, torch.Tensor):
        raise PluginError(f"{where} returned {type(loss).__name__}, not a tensor")
    if loss.shape != batch.logprobs.shape:
        shape, wanted = tuple(loss.shape), tuple(batch.logprobs.shape)
        raise PluginError(f"{where} returned a tensor of shape {shape} for {wanted[0]} tokens: return {wanted}")
    if not torch.isfinite(loss).all():
        raise PluginError(f"{where} returned a loss that is not finite for one of {len(loss)} tokens")
    if not loss.requires_grad:
        raise PluginError(f"{where} returned losses without a gradient: they do not depend on batch.logprobs")
    return loss


def try_loss(name: str) -> None:
    """Five tokens of two episodes: ratios above and below 1, advantages of both signs and 0."""
    import torch

    logprobs = torch.tensor([-0.1, -2.0, -0.7, -1.0, -0.4], requires_grad=True)
    batch = LossBatch(
        logprobs=logprobs,
        old_logprobs=torch.tensor([-0.3, -1.0, -0.7, -1.5, -0.4]),
        advantages=torch.tensor([1.0, 1.0, 1.0, -0.5, 0.0]),
        episodes=torch.tensor([0, 0, 0, 1, 1]),
    )
    total = losses(name, batch).sum()
    (gradient,) = torch.autograd.grad(total, logprobs, allow_unused=True)
    if gradient is None or not gradient.any():
        raise PluginError(f"loss {name!r} has the gradient 0 for advantages that are not")
    if not torch.isfinite(gradient).all():
        raise PluginError(f"loss {name!r} has a gradient that is not finite")
