"""The critic starts at zero, learns returns, and leaves the policy alone unless they share a trunk."""

from typing import Any

import pytest
import torch
from batches import accumulate, score
from torch import Tensor
from torch.nn import functional

from turnwise.config import LearnerConfig
from turnwise.engines.learners.critic import Critic
from turnwise.engines.learners.learner import NotFinite, Who
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.learners.losses import PolicyTokens
from turnwise.engines.model import attention
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.policy_model import ModelInputs
from turnwise.errors import EngineError

LENGTHS = [14, 9]
INDEX = torch.tensor([3, 4, 5, 9, 10, 13, 16, 17, 20, 22])
TOKENS = torch.randint(0, 96, (23,), generator=torch.Generator().manual_seed(8))
RETURNS = torch.linspace(-1.0, 1.0, len(INDEX))


def make(decoder: Decoder, shared: bool, **options: Any) -> LocalLearner:
    policy = Decoder(decoder.config, {name: tensor.clone() for name, tensor in decoder.tensors().items()})
    critic = Critic.sharing(policy) if shared else Critic.copying(policy)
    config = LearnerConfig(lr=1e-3, critic_lr=5e-3, **options)
    return LocalLearner(policy, config, temperature=1.0, critic=critic)


def value_loss(found: PolicyTokens) -> tuple[Tensor, dict[str, float]]:
    assert found.values is not None
    return (found.values - RETURNS).square().mean(), {}


def policy_loss(found: PolicyTokens) -> tuple[Tensor, dict[str, float]]:
    return -found.logprobs.mean(), {}


def changed(learner: LocalLearner, start: Decoder) -> set[str]:
    before = start.tensors()
    return {name for name, tensor in learner.model.tensors().items() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize("shared", [False, True])
def test_starts_at_zero_and_learns(decoder: Decoder, shared: bool) -> None:
    learner = make(decoder, shared)
    case = (TOKENS, LENGTHS, INDEX)
    assert score(learner, case, Who.CRITIC).tolist() == [0.0] * len(INDEX)
    losses = []
    for _ in range(25):
        losses.append(accumulate(learner, case, value_loss)["loss"])
        metrics = learner.optim_step()
    assert losses[0] == pytest.approx(float(RETURNS.square().mean()))
    assert losses[-1] < 0.2 * losses[0]
    assert metrics["critic_lr"] == 5e-3 and metrics["lr"] == 1e-3 and metrics["critic_grad_norm"] > 0
    # A value loss alone trains a shared trunk and nothing else of the policy.
    assert changed(learner, decoder) == (set(decoder.tensors()) - {"head"} if shared else set())


def test_values_are_of_the_state_before_a_token(decoder: Decoder) -> None:
    learner = make(decoder, shared=False)
    assert learner.critic is not None and learner.critic.trunk is not None
    torch.manual_seed(0)
    learner.critic.weight.data.normal_()
    learner.critic.bias.data.fill_(0.5)
    values = score(learner, (TOKENS, LENGTHS, INDEX), Who.CRITIC)
    assert not values.requires_grad
    with torch.no_grad():
        hidden = decoder(ModelInputs(TOKENS, attention.positions(LENGTHS)), attention.packed(LENGTHS))
        expected = functional.linear(hidden, learner.critic.weight)[INDEX - 1].squeeze(1) + 0.5
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-5)
    moved = TOKENS.clone()
    moved[22] = (moved[22] + 1) % 96  # the last token, which no value may see
    assert torch.equal(score(learner, (moved, LENGTHS, INDEX), Who.CRITIC), values)


def test_policy_and_critic_are_clipped_apart(decoder: Decoder) -> None:
    loud, quiet = make(decoder, shared=False), make(decoder, shared=False)
    for learner, scale in ((loud, 1e6), (quiet, 1.0)):

        def loss(found: PolicyTokens, scale: float = scale) -> tuple[Tensor, dict[str, float]]:
            return policy_loss(found)[0] + scale * value_loss(found)[0], {}

        accumulate(learner, (TOKENS, LENGTHS, INDEX), loss)
    one, two = loud.optim_step(), quiet.optim_step()
    assert one["grad_norm"] == two["grad_norm"] and one["critic_grad_norm"] > 1e3 * two["critic_grad_norm"]
    for name, tensor in loud.model.tensors().items():
        assert torch.equal(tensor, quiet.model.tensors()[name]), name


def test_a_policy_loss_leaves_an_own_critic_alone(decoder: Decoder) -> None:
    learner = make(decoder, shared=False)
    assert learner.critic is not None
    before = [parameter.detach().clone() for parameter in learner.critic.parameters()]
    accumulate(learner, (TOKENS, LENGTHS, INDEX), policy_loss)
    assert learner.optim_step()["critic_grad_norm"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, learner.critic.parameters(), strict=True))
    assert changed(learner, decoder) == set(decoder.tensors())


def test_a_broken_critic_stops_the_policy_too(decoder: Decoder) -> None:
    learner = make(decoder, shared=False)

    def loss(found: PolicyTokens) -> tuple[Tensor, dict[str, float]]:
        assert found.values is not None
        return policy_loss(found)[0] + found.values.square().sum().sqrt(), {}  # slope 0 / 0 at zero

    accumulate(learner, (TOKENS, LENGTHS, INDEX), loss)
    with pytest.raises(NotFinite, match="critic's gradient"):
        learner.optim_step()
    assert changed(learner, decoder) == set() and learner.step == 0


def test_values_need_a_critic(decoder: Decoder) -> None:
    with pytest.raises(EngineError, match="no critic"):
        score(LocalLearner(decoder, LearnerConfig(), temperature=1.0), (TOKENS, LENGTHS, INDEX), Who.CRITIC)
