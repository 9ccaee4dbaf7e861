"""The replay buffer: bounded in number, age and uses whatever comes, the same for a seed, and never changed in place."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.config import TrainingConfig
from turnwise.training.replay_buffer import ReplayEntry, candidates, choose, renew, replayed_per_step
from turnwise.types import Group, Message, Role, Sample, StopReason, Trajectory

LIMITS = st.builds(
    lambda groups, room, share, age, uses: TrainingConfig(
        groups=groups, replay_groups=room, replay_share=share, replay_age=age, replay_uses=uses
    ),
    st.integers(1, 6),
    st.integers(1, 12),
    st.sampled_from((0.1, 0.25, 0.5, 0.9)),
    st.integers(1, 4),
    st.integers(1, 3),
)
SPREADS = st.lists(st.lists(st.sampled_from((0.1, 0.25, 0.25, 0.5)), max_size=6), min_size=1, max_size=12)


def key(one: ReplayEntry) -> tuple[int, int]:
    return one.step, one.first


@given(LIMITS, SPREADS, st.integers(-5, 5))
def test_the_buffer_keeps_its_bounds_over_any_run(training, spreads, seed):
    kept, uses = [], {}
    for step, found in enumerate(spreads, start=1):
        before = copy.deepcopy(kept)
        used = choose(kept, step, training, seed)
        assert used == choose(before, step, training, seed), "the seed, the step and the buffer alone decide"
        assert len(used) == min(len(kept), replayed_per_step(training)) == len({key(one) for one in used})
        assert all(1 <= step - one.step <= training.replay_age for one in used)
        for one in used:
            uses[key(one)] = uses.get(key(one), 0) + 1
        new = [ReplayEntry(step, 4 * number, 4, spread) for number, spread in enumerate(found)]
        after = renew(kept, used, new, step, training)
        assert kept == before, "a step that fails leaves the buffer as it was"
        assert len(after) <= training.replay_groups and len({key(one) for one in after}) == len(after)
        assert all(step + 1 - one.step <= training.replay_age for one in after)
        assert all(one.uses == uses.get(key(one), 0) < training.replay_uses for one in after)
        lost = [one for one in new if one not in after]
        if lost:
            assert len(after) == training.replay_groups and max(one.spread for one in lost) <= min(
                one.spread for one in after
            ), "those whose rewards differ most stay"
        kept = after
    assert all(count <= training.replay_uses for count in uses.values())


def test_other_seeds_and_steps_draw_other_groups():
    training = TrainingConfig(groups=2, replay_groups=64, replay_share=0.5, replay_age=50)
    kept = [ReplayEntry(1, 4 * number, 4, 0.5) for number in range(64)]
    drawn = {tuple(map(key, choose(kept, step, training, seed))) for step in (2, 3) for seed in (0, 1, 2)}
    assert len(drawn) == 6
    often = [key(one) for step in range(2, 51) for one in choose(kept, step, training, 0)]
    assert len(set(often)) > 40, "no group is preferred"


@pytest.mark.parametrize(("groups", "share", "count"), [(12, 0.25, 4), (12, 0.5, 12), (3, 0.4, 2), (1, 0.1, 1)])
def test_the_share_is_of_all_groups_of_a_step(groups, share, count):
    assert replayed_per_step(TrainingConfig(groups=groups, replay_groups=9, replay_share=share)) == count
    assert replayed_per_step(TrainingConfig(groups=groups, replay_share=share)) == 0


def group(*rewards: float | None) -> Group:
    sample = Sample("s", (Message(Role.USER, "?"),), "t")
    made = [
        Trajectory(
            sample, n, 0, [], [], [], StopReason.ANSWERED, 0.0, None if reward is not None else "lost", reward=reward
        )
        for n, reward in enumerate(rewards)
    ]
    return Group(sample, made)


def test_groups_that_taught_nothing_are_not_kept_and_rows_count_them_all():
    groups = [group(0.0, 1.0), group(1.0, 1.0, 1.0), group(None, 0.0, 2.0), group(None, 1.0), group(None, None)]
    assert candidates(groups, 7, {0: 0.5, 2: None}) == [
        ReplayEntry(7, 0, 2, 0.5, baseline=0.5),
        ReplayEntry(7, 5, 3, 1.0),
    ]


@pytest.mark.parametrize("wrong", [{"step": 0}, {"first": -1}, {"rows": 0}, {"spread": float("nan")}, {"uses": -1}])
def test_what_no_buffer_holds_is_refused(wrong):
    with pytest.raises(ValueError, match="no group of a replay buffer"):
        ReplayEntry(**({"step": 1, "first": 0, "rows": 4, "spread": 0.5} | wrong))
