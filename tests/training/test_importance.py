"""The gap between sampler and learner: weights and metrics by hand, on sequences with tool and user spans."""

import math

import numpy as np
import pytest

from turnwise.config.choices import Correction, Excess
from turnwise.errors import ConfigError
from turnwise.training.importance import ImportanceCorrection, correct, gap, mismatch, ratios

RATIOS = [[1.0, 4.0, 0.5], [0.2, 1.5]]
"""learner / sampler at the policy's tokens of two sequences"""


@pytest.fixture
def made(draw):
    sampler = [[-1.0, -2.0, -0.5], [-1.5, -0.25]]
    return [
        draw(spans, trajectory=n, logprobs=sampler[n], old_logprobs=[s + math.log(r) for s, r in zip(sampler[n], RATIOS[n], strict=True)])
        for n, spans in enumerate(("ppaatau", "paua"))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (ImportanceCorrection(Correction.token, Excess.truncate, upper=2.5), [[1.0, 2.5, 0.5], [0.2, 1.5]]),
        (ImportanceCorrection(Correction.token, Excess.reject, upper=2.5), [[1.0, 0.0, 0.5], [0.0, 1.5]]),
        (ImportanceCorrection(Correction.token, Excess.reject, upper=5.0, lower=0.1), RATIOS),
        # Products 2.0 and 0.3.
        (ImportanceCorrection(Correction.sequence, Excess.truncate, upper=1.5), [[1.5] * 3, [0.3] * 2]),
        (ImportanceCorrection(Correction.sequence, Excess.reject, upper=3.0), [[2.0] * 3, [0.0] * 2]),
        # Cube root of 2 and square root of 0.3.
        (ImportanceCorrection(Correction.geometric, Excess.reject, upper=1.5), [[2 ** (1 / 3)] * 3, [0.0] * 2]),
    ],
)
def test_weights_by_hand(made, correction, expected):
    correct(made, correction)
    for sequence, weights in zip(made, expected, strict=True):
        assert sequence.gather("weights") == pytest.approx(weights)
        assert all(w == 0 for w, flag in zip(sequence.weights, sequence.loss_mask, strict=True) if not flag)


def test_log_ratios_are_bounded(draw):
    far = draw("paua", logprobs=[-400.0, 0.0], old_logprobs=[0.0, -400.0])
    assert ratios(gap([far]), Correction.token) == pytest.approx([math.exp(20), math.exp(-20)])
    metrics = correct([far], ImportanceCorrection(upper=2.0)) | mismatch([far])
    assert all(math.isfinite(value) for value in metrics.values())


def test_metrics_stay_finite_and_say_how_far_the_farthest_trajectory_is(draw):
    """One trajectory that the learner thinks impossible: perplexities would overflow, the extremes tell of it."""
    near = draw("paa", logprobs=[-1.0, -1.0], old_logprobs=[-1.0, -1.5])
    far = draw("paa", trajectory=1, logprobs=[-1.0, -1.0], old_logprobs=[-3000.0, -1000.0])
    found = mismatch([near, far])
    assert all(math.isfinite(value) for value in found.values())
    assert found["rollout_corr/log_ppl_diff_max"] == pytest.approx(1999.0)
    assert found["rollout_corr/log_ppl_diff_min"] == pytest.approx(0.25)


def test_a_trajectory_in_segments_has_one_ratio(draw):
    """Products and means go over all segments, and a mean over trajectories counts it once."""
    cut = [
        draw("paa", logprobs=[-1, -2], old_logprobs=[-1, -2 + math.log(4)]),
        draw("pa", trajectory=1, logprobs=[-1], old_logprobs=[-1 + math.log(3)]),
        draw("pa", logprobs=[-0.5], old_logprobs=[-0.5 + math.log(0.5)]),
    ]
    whole = [
        draw("paata", logprobs=[-1, -2, -0.5], old_logprobs=[-1, -2 + math.log(4), -0.5 + math.log(0.5)]),
        cut[1],
    ]
    correct(cut, ImportanceCorrection(Correction.sequence, Excess.truncate, upper=9.0))
    assert [row for s in cut for row in s.gather("weights")] == pytest.approx([2, 2, 3, 2])
    correct(cut, ImportanceCorrection(Correction.geometric, Excess.reject, upper=1.5))
    assert [row for s in cut for row in s.gather("weights")] == pytest.approx([2 ** (1 / 3)] * 2 + [0, 2 ** (1 / 3)])
    names = ("kl", "ppl_ratio", "training_ppl", "log_ppl_diff", "log_ppl_abs_diff", "chi2_seq", "abs_diff_p99")
    ours, theirs = mismatch(cut), mismatch(whole)
    assert {n: ours[f"rollout_corr/{n}"] for n in names} == pytest.approx(
        {n: theirs[f"rollout_corr/{n}"] for n in names}
    )


def test_metrics_of_the_weights(made):
    metrics = correct(made, ImportanceCorrection(Correction.token, Excess.reject, upper=2.5))
    bounded = np.array([1.0, 2.5, 0.5, 0.4, 1.5])
    expected = {
        "rollout_is_mean": 7.2 / 5, "rollout_is_max": 4.0, "rollout_is_min": 0.2, "rollout_is_std": bounded.std(),
        "rollout_is_eff_sample_size": bounded.sum() ** 2 / (5 * (bounded**2).sum()),
        "rollout_is_ratio_fraction_high": 0.2, "rollout_is_ratio_fraction_low": 0.2,
        "rollout_rs_masked_fraction": 0.4, "rollout_rs_seq_masked_fraction": 1.0,
    }  # fmt: skip
    assert metrics == pytest.approx({f"rollout_corr/{name}": value for name, value in expected.items()})
    assert not any("rollout_rs" in name for name in correct(made, ImportanceCorrection()))


def test_metrics_of_the_gap(made):
    metrics = mismatch(made)
    logs = [np.log(row) for row in RATIOS]
    flat = np.concatenate(logs)
    sampler = [np.array(s.gather("logprobs")) for s in made]
    learner = [s + d for s, d in zip(sampler, logs, strict=True)]
    expected = {
        "kl": -flat.mean(),
        "k3_kl": (np.exp(flat) - flat - 1).mean(),
        "training_ppl": np.mean([np.exp(-row.mean()) for row in learner]),
        "rollout_ppl": np.mean([np.exp(-row.mean()) for row in sampler]),
        "training_log_ppl": np.mean([-row.mean() for row in learner]),
        "rollout_log_ppl": np.mean([-row.mean() for row in sampler]),
        "log_ppl_diff": np.mean([-row.mean() for row in logs]),
        "log_ppl_diff_max": max(-row.mean() for row in logs),
        "log_ppl_diff_min": min(-row.mean() for row in logs),
        "log_ppl_abs_diff": np.mean([abs(row.mean()) for row in logs]),
        "ppl_ratio": np.mean([np.exp(-row.mean()) for row in logs]),
        "chi2_token": (1 + 16 + 0.25 + 0.04 + 2.25) / 5 - 1,
        "chi2_seq": (2.0**2 + 0.3**2) / 2 - 1,
        "abs_diff_mean": np.abs(flat).mean(),
        "abs_diff_p99": np.quantile(np.abs(flat), 0.99),
        "abs_diff_max": math.log(5),
        # Turn 0: ratios 1, 4 and 0.2; turn 1: 0.5 and 1.5.
        "turn_0/abs_diff_mean": (math.log(4) + math.log(5)) / 3,
        "turn_0/abs_diff_max": math.log(5),
        "turn_1/abs_diff_mean": (math.log(2) + math.log(1.5)) / 2,
        "turn_1/abs_diff_max": math.log(2),
    }
    found = {name.removeprefix("rollout_corr/"): v for name, v in metrics.items() if name.startswith("rollout_corr/")}
    assert found == pytest.approx(expected)
    p, q = np.exp(np.concatenate(learner)), np.exp(np.concatenate(sampler))
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(np.abs(p - q).mean())
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(np.abs(p - q).max())
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx(np.abs(p - q).std(ddof=1))
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(np.corrcoef(p, q)[0, 1])


def test_no_gap_means_weights_of_one(draw):
    same = draw("paata", logprobs=[-1, -2, -3], old_logprobs=[-1, -2, -3])
    for level in Correction:
        correct([same], ImportanceCorrection(level, Excess.reject))
        assert same.gather("weights").tolist() == [1, 1, 1]
    metrics = mismatch([same])
    assert metrics["rollout_corr/abs_diff_max"] == metrics["rollout_corr/kl"] == metrics["rollout_corr/chi2_seq"] == 0


def test_bad_input_has_a_clear_message(draw):
    with pytest.raises(ValueError, match="no old_logprobs"):
        mismatch([draw("pa")])
    with pytest.raises(ValueError, match="only be compared on sequences with policy tokens"):
        mismatch([])
    with pytest.raises(ConfigError, match="at least 1, not 0.5"):
        ImportanceCorrection(upper=0.5)
    with pytest.raises(ConfigError, match="truncate bounds from above only"):
        ImportanceCorrection(lower=0.5)
    with pytest.raises(ConfigError, match="between 0 and 1, not 1.5"):
        ImportanceCorrection(excess=Excess.reject, lower=1.5)
