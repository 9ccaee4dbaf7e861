"""KL estimators with their values and gradients, the penalty in the reward, and controllers over a checkpoint."""

import json
import math

import pytest
import torch

from turnwise.config.choices import KLEstimator
from turnwise.engines.learners.kl_estimates import estimate
from turnwise.errors import ConfigError
from turnwise.training.kl import AdaptiveKL, FixedKL, controller, penalise

D = torch.tensor([0.0, 0.5, -1.0], dtype=torch.float64)
"""logprob - reference"""


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        (KLEstimator.k1, [0.0, 0.5, -1.0], [1.0, 1.0, 1.0]),
        (KLEstimator.abs, [0.0, 0.5, 1.0], [0.0, 1.0, -1.0]),
        (KLEstimator.k2, [0.0, 0.125, 0.5], [0.0, 0.5, -1.0]),
        (KLEstimator.k3, [0.0, math.exp(-0.5) + 0.5 - 1, math.e - 2], [0.0, 1 - math.exp(-0.5), 1 - math.e]),
    ],
)
def test_estimators_and_their_gradients_by_hand(estimator, values, gradients):
    reference = torch.tensor([-1.0, -2.0, -0.25], dtype=torch.float64)
    logprobs = (reference + D).requires_grad_()
    found = estimate(logprobs, reference, estimator)
    found.sum().backward()
    assert found.tolist() == pytest.approx(values, abs=1e-12)
    assert logprobs.grad.tolist() == pytest.approx(gradients, abs=1e-12)


def test_k1_and_k3_agree_with_the_exact_kl_and_k2_has_its_gradient():
    """Over a whole distribution: E[k1] = E[k3] = KL, E[d k2] = d KL, and k1's gradient averages to nothing."""
    logits = torch.tensor([0.3, -1.2, 0.8, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.1, 0.2, 0.3], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    policy = logprobs.exp()
    exact = (policy * (logprobs - reference)).sum()
    (exact_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for estimator in (KLEstimator.k1, KLEstimator.k3):
        assert (policy * estimate(logprobs, reference, estimator)).sum().item() == pytest.approx(exact.item())
    gradients = {
        estimator: torch.autograd.grad(
            (policy.detach() * estimate(logprobs, reference, estimator)).sum(), logits, retain_graph=True
        )[0]
        for estimator in KLEstimator
    }
    torch.testing.assert_close(gradients[KLEstimator.k2], exact_gradient)
    torch.testing.assert_close(gradients[KLEstimator.k1], torch.zeros_like(logits))


def test_k3_is_bounded_at_10_without_gradient_beyond_and_exact_when_the_policies_agree():
    logprobs = torch.tensor([-500.0, -19.0, -2.6, -2.4, 500.0], dtype=torch.float64, requires_grad=True)
    found = estimate(logprobs, torch.zeros(5, dtype=torch.float64), KLEstimator.k3)
    found.sum().backward()
    # exp(2.6) - 3.6 is 9.9, the largest that is still followed; far above the reference only the log-ratio is bounded.
    assert found.tolist() == pytest.approx([10, 10, math.exp(2.6) - 3.6, math.exp(2.4) - 3.4, 10])
    assert logprobs.grad.tolist() == pytest.approx([0, 0, 1 - math.exp(2.6), 1 - math.exp(2.4), 0])
    close = estimate(torch.tensor([1e-4]), torch.tensor([0.0]), KLEstimator.k3)
    assert 0 <= close.item() < 1e-7


def test_misaligned_logprobs_are_refused():
    with pytest.raises(ValueError, match=r"\(2,\) logprobs with \(3,\)"):
        estimate(torch.zeros(2), torch.zeros(3), KLEstimator.k1)


def test_the_penalty_is_zero_at_every_token_the_policy_did_not_write(draw):
    made = [
        draw("ppataua", trajectory=0, old_logprobs=[-1.0, -2.0, -3.0], ref_logprobs=[-1.5, -2.0, -2.0]),
        draw("pau", trajectory=1, old_logprobs=[-1.0], ref_logprobs=[-3.0]),
    ]
    measure = penalise(made, KLEstimator.k1, 0.1)
    assert made[0].kl_penalties == pytest.approx([0, 0, 0.05, 0, 0.0, 0, -0.1])
    assert made[1].kl_penalties == pytest.approx([0, 0.2, 0])
    assert measure.trajectories == 2 and measure.kl == pytest.approx((-0.5 / 3 + 2.0) / 2)
    assert measure.metrics() == {"actor/reward_kl_penalty": measure.kl, "actor/reward_kl_penalty_coeff": 0.1}


def test_the_kl_of_a_trajectory_in_segments_counts_once(draw):
    one = draw("paata", trajectory=0, old_logprobs=[-1.0, -2.0, -3.0], ref_logprobs=[-2.0, -2.0, -3.0])
    cut = [
        draw("paa", trajectory=0, old_logprobs=[-1.0, -2.0], ref_logprobs=[-2.0, -2.0]),
        draw("pa", trajectory=0, old_logprobs=[-3.0], ref_logprobs=[-3.0]),
    ]
    other = draw("pa", trajectory=1, old_logprobs=[-1.0], ref_logprobs=[-4.0])
    whole, segments = (penalise([*made, other], KLEstimator.k1, 0.1) for made in ([one], cut))
    assert segments == whole and whole.trajectories == 2 and whole.kl == pytest.approx((1 / 3 + 3) / 2)


def test_kl_without_a_reference_is_refused(draw):
    with pytest.raises(ConfigError, match="needs a reference policy"):
        penalise([draw("pa", old_logprobs=[-1.0])], KLEstimator.k1, 0.1)
    with pytest.raises(ValueError, match="no old_logprobs"):
        penalise([draw("pa", ref_logprobs=[-1.0])], KLEstimator.k1, 0.1)


def test_the_adaptive_controller_follows_its_formula():
    made = AdaptiveKL(0.1, target=6.0, horizon=1000)
    made.update(6.6, 100)  # error 0.1
    assert made.value == pytest.approx(0.1 * 1.01)
    made.update(60.0, 100)  # error clipped to 0.2
    assert made.value == pytest.approx(0.1 * 1.01 * 1.02)
    made.update(0.0, 100)  # and to -0.2
    assert made.value == pytest.approx(0.1 * 1.01 * 1.02 * 0.98)


def test_controllers_go_on_from_a_checkpoint():
    first = controller(0.1, target=1.0)
    first.update(2.0, 10)
    second = controller(0.5, target=1.0)
    second.load(json.loads(json.dumps(first.state())))
    first.update(0.3, 7)
    second.update(0.3, 7)
    assert first.value == second.value != 0.1
    fixed = controller(0.2, target=None)
    fixed.update(99.0, 99)
    assert fixed.value == 0.2
    restored = FixedKL(0.9)
    restored.load(fixed.state())
    assert restored.value == 0.2
    with pytest.raises(ConfigError, match="holds a fixed KL controller, the config asks for adaptive"):
        second.load(fixed.state())


def test_controllers_refuse_what_cannot_work():
    with pytest.raises(ConfigError, match="cannot be negative"):
        FixedKL(-0.1)
    with pytest.raises(ConfigError, match="positive target and horizon"):
        AdaptiveKL(0.1, target=0.0, horizon=10)
    with pytest.raises(ConfigError, match="too short for 100 trajectories"):
        AdaptiveKL(0.1, target=1.0, horizon=10).update(0.0, 100)
    with pytest.raises(ValueError, match="measured KL is nan"):
        AdaptiveKL(0.1, target=1.0, horizon=10).update(math.nan, 1)
