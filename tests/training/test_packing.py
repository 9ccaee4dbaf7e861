"""Minibatches deal out trajectories by seed; micro-batches keep to the budget and hold the right numbers."""

import numpy as np
import pytest
import torch

from turnwise.engines.learners.device_batch import on_device
from turnwise.errors import ConfigError, DataError
from turnwise.training.packing import fill, minibatches, pack, write
from turnwise.training.sequences import LEFT_OUT


def test_a_batch_holds_the_policys_tokens_in_place(draw):
    first = draw("ppata", logprobs=[-1, -2], old_logprobs=[-3, -4], advantages=[5, 6], weights=[0, 1])
    second = draw("pauua", trajectory=1, logprobs=[-7, -8], old_logprobs=[-9, -10], advantages=[11, 12], weights=[1, 2])
    batch = pack([first, second], {0: 2, 1: 8, **dict.fromkeys(range(2, 9), 5)})
    assert batch.tokens.tolist() == [*first.token_ids, *second.token_ids] and batch.lengths.tolist() == [5, 5]
    assert batch.index.tolist() == [2, 4, 6, 9] and batch.trajectory.tolist() == [0, 0, 1, 1]
    assert batch.tokens.dtype == batch.index.dtype == batch.trajectory.dtype == np.int64
    assert batch.advantages.dtype == np.float32
    assert batch.old_logprobs.tolist() == [-3, -4, -9, -10]
    assert batch.advantages.tolist() == [5, 6, 11, 12] and batch.weights.tolist() == [0, 1, 1, 2]
    assert batch.ref_logprobs is batch.values is batch.returns is None
    assert (batch.minibatch_tokens, batch.minibatch_trajectories) == (45, 9)
    assert batch.trajectory_tokens.tolist() == [2, 8]
    tensors = on_device(batch, torch.device("cpu"))
    assert tensors.lengths == (5, 5) and tensors.index.tolist() == [2, 4, 6, 9] and tensors.returns is None
    assert tensors.trajectory_sums(tensors.advantages).tolist() == [11, 23]


def test_minibatches_hold_every_sequence_once_and_depend_on_the_seed(draw):
    data = [draw("pa" * (n % 3 + 1), trajectory=n // 2) for n in range(20)]  # two segments a trajectory

    def dealt(seed: int, epoch: int) -> list[list[int]]:
        return [[id(s) for s in part] for part in minibatches(data, 3, seed=seed, epoch=epoch)]

    parts = minibatches(data, 3, seed=1, epoch=0)
    assert sorted(len({s.trajectory for s in part}) for part in parts) == [3, 3, 4]
    assert sorted(id(s) for part in parts for s in part) == sorted(id(s) for s in data)
    for part in parts:  # whole trajectories, segments in order
        assert all(part.index(data[2 * n]) + 1 == part.index(data[2 * n + 1]) for n in {s.trajectory for s in part})
    assert dealt(1, 0) == dealt(1, 0)
    assert dealt(1, 0) != dealt(1, 1) and dealt(1, 0) != dealt(2, 0)


def test_the_shuffle_is_the_same_on_every_machine_and_run(draw):
    data = [draw("pa", trajectory=n) for n in range(8)]
    assert [[s.trajectory for s in part] for part in minibatches(data, 2, seed=7, epoch=0)] == [
        [6, 3, 2, 1],
        [7, 0, 4, 5],
    ]


def test_micro_batches_fill_the_budget(draw, micro_batches):
    data = [draw("p" * n + "aa", trajectory=n) for n in (5, 1, 8, 3, 2, 20)]
    parts = fill(data, token_budget=12)
    sizes = [[len(s.token_ids) for s in part] for part in parts]
    assert sizes == [[22], [10], [7, 5], [3, 4]]  # the longest alone, first fit for the rest, order kept inside
    batches = micro_batches(data, 12)
    assert [batch.lengths for batch in batches] == [tuple(size) for size in sizes]
    assert {(batch.minibatch_tokens, batch.minibatch_trajectories) for batch in batches} == {(12, 6)}


def test_segments_of_a_trajectory_can_be_kept_together(draw, micro_batches):
    data = [draw("p" * n + "aa", trajectory=n % 2) for n in (5, 1, 8, 3, 2)]  # 7, 3, 5 of one and 10, 4 of the other
    sizes = [[len(s.token_ids) for s in part] for part in fill(data, token_budget=16, together=True)]
    assert sizes == [[7, 3, 5], [10, 4]]
    assert [batch.trajectory_tokens.tolist() for batch in micro_batches(data, 16, together=True)] == [[6], [4]]
    apart = [[len(s.token_ids) for s in part] for part in fill(data, token_budget=10)]
    assert sorted(length for part in apart for length in part) == [3, 4, 5, 7, 10] and len(apart) == 3


def test_what_the_learner_computed_goes_back_to_its_tokens(draw):
    data = [draw("pata"), draw("paau", trajectory=1)]
    write(data, "old_logprobs", np.array([-1.0, -2.0, -3.0, -4.0], np.float32))
    assert data[0].old_logprobs.tolist() == [0, -1, 0, -2] and data[1].old_logprobs.tolist() == [0, -3, -4, 0]
    with pytest.raises(ValueError, match=r"\(3,\) values for 4 policy tokens"):
        write(data, "values", np.zeros(3))
    with pytest.raises(ValueError, match="'logprobs' is not an array that is written later"):
        write(data, "logprobs", np.zeros(4))


def test_bad_input_has_a_clear_message(draw, micro_batches):
    good = draw("pa")
    with pytest.raises(ConfigError, match="1 trajectories cannot be dealt out over 2 minibatches"):
        minibatches([good], 2, seed=0, epoch=0)
    with pytest.raises(ConfigError, match="token budget of 0"):
        micro_batches([good], 0)
    with pytest.raises(DataError, match="holds no policy token"):
        micro_batches([draw("ptu")], 10)
    with pytest.raises(DataError, match="starts with a policy token"):
        micro_batches([draw("apa")], 10)
    with pytest.raises(ValueError, match="some sequences have values, that of trajectory 0 has not"):
        micro_batches([good, draw("pa", trajectory=1, values=[1])], 10)
    with pytest.raises(ValueError, match="left out of the baselines; drop it with `trainable`"):
        micro_batches([draw("pa", group=LEFT_OUT, advantages=[0])], 10)
    good.returns = np.zeros(3)
    with pytest.raises(ValueError, match="returns of trajectory 0 has 3 entries for 2 tokens"):
        micro_batches([good], 10)
