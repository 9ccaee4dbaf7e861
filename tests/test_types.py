"""The ledger has one writer that refuses misaligned tokens; messages know what a reader takes as said."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.types import Completion, FinishReason, Image, Ledger, Message, Origin, Role, Text


def test_policy_tokens_need_logprobs_and_no_others_have_them() -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match="POLICY tokens need logprobs"):
        ledger.append([1], Origin.POLICY, 0)
    with pytest.raises(ValueError, match="TOOL tokens have no logprobs"):
        ledger.append([1], Origin.TOOL, 0, [-0.1])
    with pytest.raises(ValueError, match="2 tokens with 1 logprobs"):
        ledger.append([1, 2], Origin.POLICY, 0, [-0.1])
    assert len(ledger) == 0, "a refused append leaves nothing behind"


def test_a_completion_with_misaligned_logprobs_cannot_exist() -> None:
    with pytest.raises(ValueError, match="2 tokens with 1 logprobs"):
        Completion.of((1, 2), (0.0,), FinishReason.STOP, version=0)


pieces = st.lists(st.tuples(st.sampled_from(list(Origin)), st.integers(0, 3), st.lists(st.integers(0, 99), max_size=5)))


@given(pieces)
def test_arrays_stay_parallel_and_spans_put_together_are_the_whole(parts: list[tuple[Origin, int, list[int]]]) -> None:
    ledger = Ledger()
    for origin, turn, ids in parts:
        ledger.append(ids, origin, turn, [-0.5] * len(ids) if origin is Origin.POLICY else None)
    assert len(ledger.token_ids) == len(ledger.origins) == len(ledger.turns) == len(ledger.logprobs)
    assert ledger.loss_mask == [origin is Origin.POLICY for origin in ledger.origins]
    assert all((value != 0.0) == flag for value, flag in zip(ledger.logprobs, ledger.loss_mask, strict=True))
    spans = list(ledger.spans())
    assert [token for _, _, ids in spans for token in ids] == ledger.token_ids
    assert all(a[:2] != b[:2] for a, b in itertools.pairwise(spans)), "neighbouring spans differ"


def test_text_and_visible() -> None:
    assert Message(Role.USER, (Text("a "), Image("cat.png"), Text("b"))).text == "a b"
    assert Message(Role.ASSISTANT, "<think>x</think>42", answer="42").visible == "42"
    assert Message(Role.ASSISTANT, "42", answer="").visible == "", "an answer of nothing is nothing"
    assert Message(Role.USER, "hello").visible == "hello"
