"""The ledger has one writer that refuses misaligned tokens, and behaves as plain lists would."""

import copy
import itertools
import pickle
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.ledger import COLUMNS, NO_VERSION, Ledger, Origin, TokenTrainingData, VersionRun
from turnwise.storage.trajectories.ledger_columns import origin_counts


def test_policy_tokens_need_logprobs_and_versions_and_no_others_have_them() -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match="POLICY tokens need logprobs and versions"):
        ledger.append([1], Origin.POLICY, 0)
    with pytest.raises(ValueError, match="POLICY tokens need logprobs and versions"):
        ledger.append([1], Origin.POLICY, 0, versions=0)
    with pytest.raises(ValueError, match="POLICY tokens need versions"):
        ledger.append([1], Origin.POLICY, 0, [-0.1])
    with pytest.raises(ValueError, match="TOOL tokens have no logprobs"):
        ledger.append([1], Origin.TOOL, 0, [-0.1], 0)
    with pytest.raises(ValueError, match="TOOL tokens have no logprobs or versions"):
        ledger.append([1], Origin.TOOL, 0, [-0.1])
    with pytest.raises(ValueError, match="TOOL tokens have no logprobs or versions"):
        ledger.append([1], Origin.TOOL, 0, versions=0)
    with pytest.raises(ValueError, match="2 tokens with 1 logprobs"):
        ledger.append([1, 2], Origin.POLICY, 0, [-0.1], 0)
    with pytest.raises(ValueError, match="1 tokens with 2 logprobs"):
        ledger.append([1], Origin.POLICY, 0, [-0.1, -0.2], 0)
    with pytest.raises(ValueError, match="2 tokens with versions"):
        ledger.append([1, 2], Origin.POLICY, 0, [-0.1, -0.1], (VersionRun(3, 1),))
    for wrong in ([1.5], [[1, 2]], "12", [None]):
        with pytest.raises(ValueError, match="whole numbers"):
            ledger.append(wrong, Origin.PROMPT, 0)
    assert len(ledger) == 0, "a refused append leaves nothing behind"


@dataclass
class Lists:
    """The same ledger in plain lists, written token by token."""

    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Piece:
    origin: Origin
    turn: int
    ids: list[int]
    runs: list[int]
    """Tokens under version 0, 1, ...: as many as ids."""


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    runs = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    ids = draw(st.lists(st.integers(0, 200_000), min_size=sum(runs), max_size=sum(runs)))
    return Piece(draw(st.sampled_from(list(Origin))), draw(st.integers(0, 3)), ids, runs)


def write(parts: list[Piece]) -> tuple[Ledger, Lists]:
    ledger, lists = Ledger(), Lists()
    for part in parts:
        policy = part.origin is Origin.POLICY
        logprobs = [-float(token % 7) for token in part.ids]
        versions = tuple(VersionRun(version, tokens) for version, tokens in enumerate(part.runs))
        if policy:
            ledger.append(np.array(part.ids, dtype=np.int64), part.origin, part.turn, logprobs, versions)
        else:
            ledger.append(part.ids, part.origin, part.turn)
        written = iter([version for version, tokens in enumerate(part.runs) for _ in range(tokens)])
        for token, logprob in zip(part.ids, logprobs, strict=True):
            lists.token_ids.append(token)
            lists.origins.append(part.origin)
            lists.turns.append(part.turn)
            lists.logprobs.append(logprob if policy else 0.0)
            lists.versions.append(next(written) if policy else NO_VERSION)
    return ledger, lists


@given(st.lists(pieces()), st.data())
def test_it_is_what_plain_lists_would_be(parts: list[Piece], data: st.DataObject) -> None:
    ledger, lists = write(parts)
    for name, dtype in COLUMNS.items():
        column = getattr(ledger, name)
        assert (column.tolist(), column.dtype) == (getattr(lists, name), dtype)
        assert not column.flags.writeable
    assert ledger.loss_mask.tolist() == [origin is Origin.POLICY for origin in lists.origins]
    assert origin_counts([ledger, ledger]) == {origin: 2 * lists.origins.count(origin) for origin in Origin}
    spans = list(ledger.spans())
    assert [token for _, _, ids in spans for token in ids.tolist()] == lists.token_ids
    told = [(origin, turn) for origin, turn, ids in spans for _ in ids]
    assert told == list(zip(lists.origins, lists.turns, strict=True))
    assert all(a[:2] != b[:2] for a, b in itertools.pairwise(spans)), "neighbouring spans differ"
    assert ledger == Ledger.of(*(getattr(lists, name) for name in COLUMNS))
    length = data.draw(st.integers(0, len(ledger)))
    cut = ledger.prefix(length)
    assert [getattr(cut, name).tolist() for name in COLUMNS] == [getattr(lists, name)[:length] for name in COLUMNS]
    assert (cut == ledger) == (length == len(ledger))


@given(st.lists(pieces(), max_size=4), st.lists(pieces(), max_size=4))
def test_copies_prefixes_and_views_go_their_own_way(first: list[Piece], later: list[Piece]) -> None:
    ledger, _ = write(first)
    before, _ = write(first)
    views = [getattr(ledger, name) for name in COLUMNS]
    copies = [copy.deepcopy(ledger), pickle.loads(pickle.dumps(ledger)), ledger.prefix(len(ledger))]
    assert all(one == ledger for one in copies)
    for part in later:
        for one in (ledger, *copies):
            if part.origin is Origin.POLICY:
                one.append(part.ids, part.origin, part.turn, [0.5] * len(part.ids), 9)
            else:
                one.append(part.ids, part.origin, part.turn)
    assert all(one == ledger for one in copies), "each took the same tokens after the same"
    assert [view.tolist() for view in views] == [getattr(before, name).tolist() for name in COLUMNS]
    copies[2].append([77], Origin.USER, 5)
    assert len(ledger) == len(before) + sum(len(part.ids) for part in later)


@given(st.lists(pieces(), max_size=3), st.lists(pieces(), max_size=4), st.lists(pieces(), max_size=2))
def test_spans_at_once_are_as_one_by_one(first: list[Piece], spans: list[Piece], last: list[Piece]) -> None:
    others = [replace(span, origin=Origin.TOOL if span.origin is Origin.POLICY else span.origin) for span in spans]
    ledger, _ = write(first)
    ledger.append_given([(span.ids, span.origin) for span in others], 7)
    end, _ = write(last)
    for ids, origin, logprob in zip(end.token_ids, end.origins, end.logprobs, strict=True):
        policy = origin == Origin.POLICY
        ledger.append([ids], Origin(origin), 8, [logprob] if policy else None, 3 if policy else None)
    ends = [replace(piece, turn=8, runs=[0, 0, 0, len(piece.ids)]) for piece in last]
    assert ledger == write([*first, *(replace(span, turn=7) for span in others), *ends])[0]


def test_spans_at_once_are_refused_as_a_whole() -> None:
    ledger, _ = write([Piece(Origin.PROMPT, 0, [1, 2], [2])])
    for wrong in ([([3], Origin.POLICY)], [([3], Origin.TOOL), ([1.5], Origin.USER)]):
        with pytest.raises(ValueError, match=r"POLICY tokens need|whole numbers"):
            ledger.append_given(wrong, 0)
    with pytest.raises(OverflowError):
        ledger.append([3], Origin.POLICY, 0, [-0.5], 1 << 40)
    ledger.append([4], Origin.TOOL, 0)
    assert ledger == write([Piece(Origin.PROMPT, 0, [1, 2], [2]), Piece(Origin.TOOL, 0, [4], [1])])[0]


def test_what_is_handed_out_cannot_change_the_ledger() -> None:
    ledger, _ = write([Piece(Origin.PROMPT, 0, [1, 2], [2]), Piece(Origin.POLICY, 0, [3], [1])])
    given = np.array([0.0, 0.0, -0.5], dtype=np.float32)
    ledger.training = TokenTrainingData(advantages=given)
    given[2] = 7.0
    for column in [*(getattr(ledger, name) for name in COLUMNS), ledger.training.advantages]:
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1
    ledger.loss_mask[:] = True
    assert ledger.loss_mask.tolist() == [False, False, True]
    assert ledger.training == TokenTrainingData(advantages=[0.0, 0.0, -0.5])


def test_equality_knows_training_and_takes_unknown_for_unknown() -> None:
    def one() -> Ledger:
        ledger = Ledger()
        ledger.append([5, 6], Origin.POLICY, 0, [float("nan"), -1.0], 0)
        ledger.training = TokenTrainingData(logprobs=[float("nan"), -1.0])
        return ledger

    assert one() == one() == copy.deepcopy(one()) == pickle.loads(pickle.dumps(one()))
    other = one()
    other.training = TokenTrainingData(values=[float("nan"), -1.0])
    assert other != one() and one().prefix(2) != one() and one() != [5, 6]


@pytest.mark.parametrize(
    "columns",
    [
        ([1, 2], [0, 0], [0], [0.0, 0.0], [-1, -1]),
        ([1], [9], [0], [0.0], [-1]),
        ([1], [0], [0], [-0.5], [-1]),
        ([1], [0], [0], [0.0], [3]),
        ([1 << 70], [0], [0], [0.0], [-1]),
        (5, 0, 0, 0.0, -1),
        ("abc", [0], [0], [0.0], [-1]),
    ],
)
def test_columns_that_no_append_could_have_made_are_refused(columns: tuple[object, ...]) -> None:
    with pytest.raises(ValueError):
        Ledger.of(*columns)
