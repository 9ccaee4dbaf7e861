"""The numbers of a pass over prompts: every token once, in blocks that never mix two chunks, the padding nobody's."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.engines.samplers.gpu.pass_shapes import (
    DECODE_ROWS,
    PromptChunk,
    block_count,
    decode_bucket,
    decode_sizes,
    packed_chunks,
    pass_bucket,
    pass_rows,
    pass_sizes,
)  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 90), st.booleans()), min_size=1, max_size=40),
    st.sampled_from([1, 5, 16]),
    st.sampled_from([7, 16, 256]),
)
@settings(max_examples=100, deadline=None)
def test_a_pass_holds_every_token_once(chunks: list[tuple[int, int, bool]], block: int, smallest: int) -> None:
    given_chunks = [
        PromptChunk(slot, start, np.arange(length) + 100 * slot, last)
        for slot, (length, start, last) in enumerate(chunks)
    ]
    total = sum(length for length, _, _ in chunks)
    tokens = pass_bucket(total, len(chunks), smallest)
    rows = pass_rows(tokens)
    blocks = block_count(tokens, rows, block)
    numbers = packed_chunks(given_chunks, tokens, rows, block)
    ids, places, slots, first, count, slot, place, wanted, last = np.split(
        numbers, np.cumsum([tokens] * 3 + [blocks] * 4 + [rows] * 2)[:-1]
    )
    assert (slots[total:] == -1).all() and (slots[:total] >= 0).all()
    seen = np.zeros(tokens, dtype=int)
    for begin, size, owner, where in zip(first, count, slot, place, strict=True):
        assert 0 <= size <= block
        seen[begin : begin + size] += 1
        assert (slots[begin : begin + size] == owner).all()
        assert places[begin : begin + size].tolist() == list(range(where, where + size))
    assert (seen[:total] == 1).all() and not seen[total:].any()
    for row, chunk in enumerate(given_chunks):
        mine = slots[:total] == chunk.slot
        assert ids[:total][mine].tolist() == chunk.tokens.tolist() and places[:total][mine][0] == chunk.start
        assert wanted[row] == (chunk.slot if chunk.last else -1) and last[row] == np.flatnonzero(mine)[-1]
    assert (wanted[len(chunks) :] == -1).all()


def test_buckets_hold_what_they_are_for_and_are_few() -> None:
    assert all(decode_bucket(rows) >= rows for rows in range(1, 2049))
    assert sorted({decode_bucket(rows) for rows in range(1, 1025)}) == decode_sizes(1024) == list(DECODE_ROWS)
    assert decode_sizes(1) == [16] and decode_sizes(100) == [16, 64, 128] and decode_sizes(1300)[-1] == 1536
    for chunks in (1, 65, 129, 512):
        found = {pass_bucket(tokens, chunks, 256) for tokens in range(chunks, 8193)}
        assert found <= set(pass_sizes(8192, 256)) and all(pass_rows(size) >= chunks for size in found)
    assert all(pass_bucket(tokens, 1, 256) >= tokens for tokens in range(1, 20_000, 7))
    assert pass_sizes(8192, 256) == [256, 1024, 2048, 4096, 8192] and pass_sizes(300, 256) == [256, 1024]
