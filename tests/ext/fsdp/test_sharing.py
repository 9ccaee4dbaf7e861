"""A minibatch dealt out over ranks: nothing is lost or done twice, and nobody has much more to do than another."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import batch_of

from turnwise import configure
from turnwise.engines import bundled
from turnwise.engines.learners.learner import TokenBatch
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.policy_model import StateShape
from turnwise.errors import EngineError
from turnwise.ext.fsdp.learner import deal, laid_out
from turnwise.ext.fsdp.models import _refuse_slices
from turnwise.ledger import Media, MediaSpan, check_places
from turnwise.reports.plan import plan_text
from turnwise.rollout.prepare import prepare


def batches(seed: int, count: int = 3) -> list[TokenBatch]:
    """Sequences of 3 to 40 tokens, of which all but the first two are the policy's."""
    noise = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        lengths = noise.integers(3, 40, 9).tolist()
        starts = np.cumsum([0, *lengths[:-1]])
        index = np.concatenate([start + np.arange(2, length) for start, length in zip(starts, lengths, strict=True)])
        tokens = noise.integers(0, 96, sum(lengths))
        made.append(
            batch_of(
                torch.from_numpy(tokens), lengths, torch.from_numpy(index), advantages=noise.normal(size=len(index))
            )
        )
    total = sum(len(batch.index) for batch in made)
    return [replace(batch, minibatch_tokens=total, minibatch_trajectories=9 * count) for batch in made]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_token_is_dealt_once_and_comes_back_to_its_place(ranks: int) -> None:
    given = batches(ranks)
    shares = deal(given, ranks, 64)
    assert len(shares) == ranks and len({len(mine) for mine in shares}) == 1
    load = [sum(len(share.batch.tokens) for share in mine if share is not None) for mine in shares]
    assert sum(load) == sum(len(batch.tokens) for batch in given)
    assert max(load) - min(load) <= 40, "no more than one sequence apart"
    for share in (share for mine in shares for share in mine if share is not None):
        assert len(share.batch.tokens) <= 64
    policy_tokens = [[s.batch.tokens[s.batch.index] if s else np.zeros(0) for s in mine] for mine in shares]
    for found, batch in zip(laid_out(policy_tokens, shares, given), given, strict=True):
        assert found.tolist() == batch.tokens[batch.index].tolist()
    advantages = [[s.batch.advantages if s else np.zeros(0) for s in mine] for mine in shares]
    for found, batch in zip(laid_out(advantages, shares, given), given, strict=True):
        assert batch.advantages is not None and np.array_equal(found, batch.advantages)


def test_a_rank_without_a_share_joins_in_and_a_long_one_stands_alone() -> None:
    long = batch_of(torch.arange(90), [80, 10], torch.tensor([5, 6, 79, 85]))
    shares = deal([long], 3, 50)
    assert [[share is not None for share in mine] for mine in shares] == [[True], [True], [False]]
    assert shares[0][0] is not None and len(shares[0][0].batch.tokens) == 80


def test_segments_of_a_trajectory_stay_together() -> None:
    one = batch_of(torch.arange(30), [10, 10, 10], torch.tensor([5, 6, 15, 25]))
    two_segments = TokenBatch(one.tokens, one.lengths, one.index, np.array([0, 0, 1, 0]), np.array([3, 1]), 4, 2)
    shares = deal([two_segments], 2, 100)
    first, second = (mine[0] for mine in shares)
    assert first is not None and second is not None
    assert first.batch.lengths.tolist() == [10, 10] and first.places.tolist() == [0, 1, 3]
    assert first.batch.trajectory_tokens.tolist() == [3] and second.batch.trajectory_tokens.tolist() == [1]


def test_batches_of_different_minibatches_are_refused() -> None:
    one, two = batches(0, 1)[0], batch_of(torch.arange(6), [6], torch.tensor([3]))
    with pytest.raises(EngineError, match="differ in advantages"):
        deal([one, two], 1, 1000)


def test_images_go_with_their_sequences() -> None:
    noise = np.random.default_rng(4)
    marks = {
        name: Media(name, b"", np.array([70 + i, 70 + i]), np.array([True, True]), {}) for i, name in enumerate("abc")
    }
    given = batches(7, count=2)
    shown: list[TokenBatch] = []
    for batch in given:
        starts = np.cumsum(batch.lengths) - batch.lengths
        spans = [MediaSpan(marks["abc"[noise.integers(3)]], int(start)) for start in starts[[1, 4, 8]]]
        tokens = batch.tokens.copy()
        for span in spans:
            tokens[span.start : span.end] = span.media.token_ids
        shown.append(replace(batch, tokens=tokens, media=tuple(spans)))
    found = []
    for share in (share for mine in deal(shown, 3, 64) for share in mine if share is not None):
        check_places(share.batch.media, share.batch.tokens)
        found += [span.media.digest for span in share.batch.media]
    assert sorted(found) == sorted(span.media.digest for batch in shown for span in batch.media)


def test_ranks_that_share_a_sequence_must_divide_its_heads() -> None:
    model = Decoder.skeleton(next(iter(bundled.__path__)) / Path("tiny"))
    _refuse_slices(model, 1)
    with pytest.raises(EngineError, match=r"fsdp.context_parallel=7 does not divide the \d+ query heads"):
        _refuse_slices(model, 7)
    model.shape = replace(model.shape, states=(StateShape(((4,),), (torch.float32,)),))
    with pytest.raises(EngineError, match="has recurrent layers, whose states go from token to token"):
        _refuse_slices(model, 2)


def test_the_plan_says_how_many_copies_share_the_state() -> None:
    settings = ("learner.processes=4", "fsdp.replicas=2", "fsdp.context_parallel=2", "learner.device=cpu")
    config = configure(*settings)
    text = plan_text(prepare(config, "train", limit=2), training=True)
    assert "4 processes on the CPU (gloo)" in text and "each 2 of them, 2 replicas (HSDP)" in text
    assert "(HSDP); each 2 share the tokens of a sequence" in text
