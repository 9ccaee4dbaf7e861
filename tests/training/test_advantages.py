"""Advantages on trajectories with tool and user spans, against numbers worked out by hand or by slow numpy."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.config.choices import Advantage
from turnwise.errors import ConfigError, DataError
from turnwise.training.advantages import (
    against_group,
    assign,
    check,
    explained_variance,
    gae,
    returns_to_go,
    whiten,
)
from turnwise.training.sequences import LEFT_OUT


def test_gae_by_hand_over_a_tool_span():
    # Policy tokens 0, 1 and 4; gamma 0.9, gae_lambda 0.8, reward 1 on the last. From the end:
    # d3 = 1 - 0.5 = 0.5; d2 = 0.9 * 0.5 - 0.4 = 0.05, A2 = 0.05 + 0.72 * 0.5 = 0.41;
    # d1 = 0.9 * 0.4 - 0.2 = 0.16, A1 = 0.16 + 0.72 * 0.41 = 0.4552.
    mask = [True, True, False, False, True, False]
    values = [0.2, 0.4, 99.0, 99.0, 0.5, 99.0]
    advantages, returns = gae([0.0, 0.0, 0.0, 0.0, 1.0, 0.0], values, mask, 0.9, 0.8)
    assert advantages == pytest.approx([0.4552, 0.41, 0, 0, 0.5, 0])
    assert returns == pytest.approx([0.6552, 0.81, 0, 0, 1.0, 0])


def slow_gae(rewards, values, gamma, gae_lambda):
    """The definition: the sum over later deltas of (gamma gae_lambda)^k delta."""
    following = np.append(values[1:], 0.0)
    deltas = np.array(rewards) + gamma * following - np.array(values)
    weights = (gamma * gae_lambda) ** np.arange(len(deltas))
    return [float((weights[: len(deltas) - t] * deltas[t:]).sum()) for t in range(len(deltas))]


numbers = st.floats(-3, 3)
tokens = st.lists(st.tuples(numbers, numbers, st.booleans()), min_size=1, max_size=30)


@settings(max_examples=150, deadline=None)
@given(tokens, st.floats(0, 1), st.floats(0, 1))
def test_gae_is_gae_on_the_compacted_sequence(row, gamma, gae_lambda):
    rewards, values, mask = (list(column) for column in zip(*row, strict=True))
    advantages, returns = gae(rewards, values, mask, gamma, gae_lambda)
    kept = [(r, v) for r, v, flag in row if flag]
    expected = slow_gae([r for r, _ in kept], [v for _, v in kept], gamma, gae_lambda) if kept else []
    assert [a for a, flag in zip(advantages, mask, strict=True) if flag] == pytest.approx(expected, abs=1e-9)
    compact = [a + v for a, (_, v) in zip(expected, kept, strict=True)]
    assert [g for g, flag in zip(returns, mask, strict=True) if flag] == pytest.approx(compact, abs=1e-9)
    assert all(a == g == 0 for a, g, flag in zip(advantages, returns, mask, strict=True) if not flag)


def test_gae_refuses_misaligned_rows():
    with pytest.raises(ValueError, match="2 rewards, 1 values and a mask of 2"):
        gae([0.0, 1.0], [0.0], [True, True], 1.0, 1.0)


def test_the_reward_lands_on_the_last_policy_token_even_when_a_user_has_the_last_word(draw):
    """With gamma = gae_lambda = 1 and values 0 every policy token gets the reward; verl's placement would give 0."""
    made = draw("ppaattauu", reward=2.0, values=[0, 0, 0])
    assign([made], Advantage.gae, whitened=False)
    assert made.advantages.tolist() == made.returns.tolist() == [0, 0, 2, 2, 0, 0, 2, 0, 0]
    assign([made], Advantage.gae, gae_lambda=0.0, whitened=False)
    assert made.advantages.tolist() == [0, 0, 0, 0, 0, 0, 2, 0, 0]


def test_gae_runs_on_through_the_segments_of_a_trajectory(draw):
    split = [draw("ppaat", reward=1.0, values=[0.2, 0.4]), draw("pppua", reward=1.0, values=[0.5])]
    whole = draw("ppaatttua", reward=1.0, values=[0.2, 0.4, 0.5])
    assign(split, Advantage.gae, gamma=0.9, gae_lambda=0.8, whitened=False)
    assign([whole], Advantage.gae, gamma=0.9, gae_lambda=0.8, whitened=False)
    for name in ("advantages", "returns"):
        assert [*split[0].gather(name), *split[1].gather(name)] == whole.gather(name).tolist()
    assert whole.gather("advantages") == pytest.approx([0.4552, 0.41, 0.5])


def test_kl_penalties_are_rewards_of_their_tokens(draw):
    made = draw("pataa", reward=1.0, values=[0, 0, 0], kl_penalties=[0.1, 0.2, 0.4])
    metrics = assign([made], Advantage.gae, whitened=False)
    assert made.gather("advantages") == pytest.approx([1 - 0.7, 1 - 0.6, 1 - 0.4])
    assert metrics["critic/score/mean"] == 1.0 and metrics["critic/rewards/mean"] == pytest.approx(0.3)
    pair = [draw("paua", group=0, trajectory=n, reward=1.0, kl_penalties=[0.0, n]) for n in (0, 1)]
    assign(pair, Advantage.dr_grpo)
    assert [one.gather("advantages").tolist() for one in pair] == [[0.5, 0.5], [-0.5, -0.5]]


def test_whitened_gae_has_mean_0_and_sample_variance_1_over_policy_tokens(draw):
    made = [draw("paataau", trajectory=n, reward=n, values=[0.1 * n, 0.3, -0.2, 0.4]) for n in range(3)]
    metrics = assign(made, Advantage.gae, gamma=0.95, gae_lambda=0.9)
    flat = [value for sequence in made for value in sequence.gather("advantages")]
    assert np.mean(flat) == pytest.approx(0, abs=1e-9) and np.var(flat, ddof=1) == pytest.approx(1, abs=1e-6)
    raw = [slow_gae([0, 0, 0, n], [0.1 * n, 0.3, -0.2, 0.4], 0.95, 0.9) for n in range(3)]
    flat_raw = np.concatenate(raw)
    assert flat == pytest.approx(((flat_raw - flat_raw.mean()) / flat_raw.std(ddof=1)).tolist(), abs=1e-6)
    assert metrics["critic/values/max"] == pytest.approx(0.4) and metrics["critic/advantages/mean"] == pytest.approx(0)


REWARDS, GROUPS = [1.0, 0.0, 0.0, 1.0, 5.0, 9.0, 7.0], [0, 0, 0, 0, 1, 1, LEFT_OUT]


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        # Group 0: mean 1/2, sample variance 4 * 0.25 / 3; group 1: mean 7, sample standard deviation sqrt(8).
        (Advantage.grpo, [0.5 / math.sqrt(1 / 3), -0.5 / math.sqrt(1 / 3), -2 / math.sqrt(8), 2 / math.sqrt(8)]),
        (Advantage.dr_grpo, [0.5, -0.5, -2.0, 2.0]),
        # 1 - (0 + 0 + 1) / 3, 0 - (1 + 0 + 1) / 3, 5 - 9, 9 - 5
        (Advantage.rloo, [2 / 3, -2 / 3, -4.0, 4.0]),
    ],
)
def test_group_baselines_by_hand(draw, advantage, expected):
    high, low, first, second = expected
    wanted = [high, low, low, high, first, second, 0.0]
    assert against_group(advantage, REWARDS, GROUPS) == pytest.approx(wanted, abs=1e-5)
    made = [
        draw("ppaatauu", reward=reward, group=group, trajectory=n)
        for n, (reward, group) in enumerate(zip(REWARDS, GROUPS, strict=True))
    ]
    metrics = assign(made, advantage)
    for sequence, value in zip(made, wanted, strict=True):
        assert sequence.advantages == pytest.approx([0, 0, value, value, 0, value, 0, 0], abs=1e-5)
        assert sequence.returns is None
    assert metrics["critic/score/mean"] == pytest.approx(16 / 6)
    assert metrics["training/groups_without_baseline"] == 0


def test_equal_rewards_have_no_advantage():
    for advantage in (Advantage.grpo, Advantage.dr_grpo, Advantage.rloo):
        assert against_group(advantage, [0.3, 0.3, 0.3], [0, 0, 0]) == pytest.approx([0, 0, 0], abs=1e-9)


def test_a_trajectory_counts_once_however_many_sequences_hold_it(draw):
    made = [
        draw("paa", reward=1.0, trajectory=0),
        draw("pppta", reward=1.0, trajectory=0),
        draw("pa", reward=0.0, trajectory=1),
    ]
    assign(made, Advantage.dr_grpo)
    assert [s.gather("advantages").tolist() for s in made] == [[0.5, 0.5], [0.5], [-0.5]]


def test_the_only_survivor_of_a_group_has_no_advantage_and_is_counted(draw):
    made = [
        draw("pa", reward=1.0, group=0, trajectory=0),
        draw("pa", reward=math.nan, group=LEFT_OUT, trajectory=1),
        draw("pa", reward=1.0, group=1, trajectory=2),
        draw("pa", reward=0.0, group=1, trajectory=3),
    ]
    metrics = assign(made, Advantage.grpo)
    assert made[0].advantages.tolist() == made[1].advantages.tolist() == [0, 0]
    assert made[2].gather("advantages")[0] > 0 > made[3].gather("advantages")[0]
    assert metrics["training/groups_without_baseline"] == 1


def test_reinforce_pp_keeps_the_turns_before_a_tool_span(draw):
    """Return-to-go over policy tokens, then whitened: earlier turns get their discounted share, not zero."""
    made = [draw("paattaau", trajectory=0, reward=1.0), draw("pauua", trajectory=1, reward=-1.0)]
    assign(made, Advantage.reinforce_pp, gamma=0.5)
    assert [one.gather("returns").tolist() for one in made] == [[0.125, 0.25, 0.5, 1.0], [-0.5, -1.0]]
    raw = np.array([0.125, 0.25, 0.5, 1.0, -0.5, -1.0])
    expected = (raw - raw.mean()) / np.sqrt(raw.var(ddof=1))
    assert [*made[0].gather("advantages"), *made[1].gather("advantages")] == pytest.approx(expected.tolist(), abs=1e-6)
    assert made[0].advantages[3:5].tolist() == [0, 0]


def test_returns_to_go_with_kl():
    assert returns_to_go([-0.1, -0.2, 0.7], 1.0) == pytest.approx([0.4, 0.5, 0.7])


def test_remax_subtracts_the_greedy_reward(draw):
    made = [draw("pataua", group=n, trajectory=n, reward=1.0) for n in (0, 1)]
    metrics = assign(made, Advantage.remax, baselines={0: 0.25, 1: None})
    assert made[0].advantages.tolist() == [0, 0.75] * 3 and made[0].gather("returns").tolist() == [1, 1, 1]
    assert not made[1].gather("advantages").any() and metrics["training/groups_without_baseline"] == 1
    with pytest.raises(ConfigError, match="greedy rollout"):
        assign(made, Advantage.remax)
    with pytest.raises(ValueError, match="group 1 has no greedy baseline"):
        assign(made, Advantage.remax, baselines={0: 0.25})


def test_metrics_have_verls_names(draw):
    made = [draw("paata", trajectory=n, reward=n, values=[0.5, 0.25, 0.75]) for n in range(2)]
    metrics = assign(made, Advantage.gae, whitened=False)
    names = [
        f"critic/{n}/{k}"
        for n in ("score", "rewards", "advantages", "returns", "values")
        for k in ("mean", "max", "min")
    ]
    assert set(metrics) == {*names, "critic/vf_explained_var", "training/groups_without_baseline"}
    assert metrics["critic/returns/mean"] == 0.5 and metrics["critic/returns/max"] == 1.0


def test_explained_variance_by_hand():
    returns = np.array([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == pytest.approx(1)
    assert explained_variance(returns, np.full(4, 7.0)) == pytest.approx(0, abs=1e-4)
    # Errors 0, 1, 1, 2: variance 2/3 against 5/3.
    assert explained_variance(returns, np.array([0.0, 0.0, 1.0, 1.0])) == pytest.approx(1 - (2 / 3) / (5 / 3), abs=1e-4)


@pytest.mark.parametrize("advantage", [Advantage.grpo, Advantage.dr_grpo, Advantage.rloo])
def test_a_group_of_one_is_refused_before_anything_runs(advantage):
    with pytest.raises(ConfigError, match=f"{advantage.value} compares the episodes of a group.* at least 2"):
        check(advantage, group_size=1)
    check(advantage, group_size=2)


def test_other_baselines_take_a_group_of_one_and_bad_discounts_are_refused():
    for advantage in (Advantage.gae, Advantage.reinforce_pp, Advantage.remax):
        check(advantage, group_size=1)
    with pytest.raises(ConfigError, match="gamma must lie between 0 and 1, not 1.5"):
        check(Advantage.gae, group_size=1, gamma=1.5)


def test_bad_input_has_a_clear_message(draw):
    with pytest.raises(ConfigError, match="gae needs the values of a critic"):
        assign([draw("pa"), draw("pa", trajectory=1, values=[1])], Advantage.gae)
    with pytest.raises(DataError, match="all failed"):
        assign([draw("pa", group=LEFT_OUT)], Advantage.grpo)
    with pytest.raises(DataError, match="trajectory 4 has the reward nan"):
        assign([draw("pa", trajectory=4, reward=math.nan)], Advantage.grpo)
    with pytest.raises(ValueError, match="differ in reward or group"):
        assign([draw("pa", reward=1.0), draw("pa", reward=0.0)], Advantage.grpo)
    with pytest.raises(ValueError, match="no kl_penalties"):
        assign([draw("pa", kl_penalties=[1]), draw("pa")], Advantage.dr_grpo)
    with pytest.raises(DataError, match="cannot be whitened"):
        whiten(np.array([1.0]))
    with pytest.raises(ValueError, match="does not compare siblings"):
        against_group(Advantage.gae, [1.0, 2.0], [0, 0])
    with pytest.raises(ValueError, match="2 rewards with 1 groups"):
        against_group(Advantage.grpo, [1.0, 2.0], [0])
