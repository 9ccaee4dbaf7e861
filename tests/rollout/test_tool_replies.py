"""What is cut of a long reply: so many tokens are kept, no sign is torn, and the note counts what is missing."""

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.config.choices import Keep
from turnwise.rollout.toolbox.replies import CHARACTERS_PER_TOKEN, MOST_PER_TOKEN, fit


def cut(text, limit, keep=Keep.both, spans=None):
    return asyncio.run(fit(text, limit, keep, spans))


def letters(text):
    """A tokenizer that takes every letter for a token."""
    return [(at, at + 1) for at in range(len(text))]


def halves(text):
    """One that makes two tokens of every letter, as bytes of a longer letter are."""
    return [(at, at + 1) for at in range(len(text)) for _ in range(2)]


def pieces(shown):
    head, missing, tail = re.fullmatch(
        r"(.*?)\n\[\.\.\. (\d+) characters left out \.\.\.\]\n(.*)", shown, re.DOTALL
    ).groups()
    return head, int(missing), tail


@given(text=st.text("ab é", max_size=300), limit=st.integers(1, 80), keep=st.sampled_from(Keep))
def test_the_tokens_asked_for_are_kept_and_the_rest_is_counted(text, limit, keep):
    shown, was_cut = cut(text, limit, keep, letters)
    assert was_cut == (len(text) > limit)
    if not was_cut:
        assert shown == text
        return
    head, missing, tail = pieces(shown)
    assert len(head) + len(tail) == limit and missing == len(text) - limit
    assert text.startswith(head) and text.endswith(tail)
    assert {Keep.head: not tail, Keep.tail: not head, Keep.both: len(head) - len(tail) in (0, 1)}[keep]


@pytest.mark.parametrize("keep", Keep)
def test_a_letter_of_which_half_is_left_out_goes_with_it(keep):
    head, missing, tail = pieces(cut("x" * 100, 7, keep, halves)[0])
    assert (len(head), len(tail)) == {Keep.head: (3, 0), Keep.tail: (0, 3), Keep.both: (2, 1)}[keep]
    assert missing == 100 - len(head) - len(tail)


@pytest.mark.parametrize("keep", Keep)
def test_real_tokens_are_counted(keep, renderer):
    def spans(text):
        return renderer.tokenizer.encode(text).offsets

    text = "Grüße \N{GRINNING FACE} and 12345 more; " * 50
    head, missing, tail = pieces(cut(text, 60, keep, spans)[0])
    assert text.startswith(head) and text.endswith(tail) and len(head) + missing + len(tail) == len(text)
    kept = len(spans(head)) + len(spans(tail))
    assert 50 <= kept <= 62  # pieces may join otherwise at a border


def test_far_more_than_can_be_shown_is_not_encoded():
    seen = []

    def counting(text):
        seen.append(len(text))
        return letters(text)

    text = "x" * 1_000_000
    head, missing, tail = pieces(cut(text, 10, Keep.both, counting)[0])
    assert (len(head), missing, len(tail)) == (5, 999_990, 5) and sum(seen) == 2 * 10 * MOST_PER_TOKEN
    few = cut(" " * 1_000_000, 10, Keep.head, lambda text: [(0, len(text))])[0]  # one token, however long
    assert pieces(few) == (" " * 10 * MOST_PER_TOKEN, 1_000_000 - 10 * MOST_PER_TOKEN, "")


def test_without_a_tokenizer_a_token_is_four_characters():
    assert cut("x" * 40, 10) == ("x" * 40, False)
    head, missing, tail = pieces(cut("x" * 41, 10)[0])
    assert (len(head) + len(tail), missing) == (10 * CHARACTERS_PER_TOKEN, 1)


@pytest.mark.parametrize(
    "sign", ["e\u0301", "\U0001f469\u200d\U0001f52c", "\U0001f44d\U0001f3fd", "\u2764\ufe0f", "\r\n"], ids=ascii
)
def test_no_sign_is_torn(sign):
    for keep in Keep:
        for limit in range(1, 12):
            head, _, tail = pieces(cut("ab" + sign * 20, limit, keep, letters)[0])
            assert head.removeprefix("ab").replace(sign, "") in ("", "a", "b") and tail.replace(sign, "") == ""
