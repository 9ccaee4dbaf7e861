"""Rows grow without losing content; cached and shared caches stay within their bytes and forget the oldest first."""

import numpy as np
import torch

from turnwise.engines.model.checkpoint_format import DecoderConfig
from turnwise.engines.samplers.kv_cache import (
    PREFIX_BLOCK,
    ActiveRows,
    KVSpan,
    PrefixBlocks,
    SessionCache,
    SessionCaches,
    block_hashes,
)

CONFIG = DecoderConfig("llama", 32, 16, 32, 2, 2, 1, 8, 4096)


def span(length: int, seed: int = 0) -> KVSpan:
    noise = torch.Generator().manual_seed(seed)
    return KVSpan(torch.randn(2, 1, 8, length, generator=noise), torch.randn(2, 1, length, 8, generator=noise))


def same(a: KVSpan, b: KVSpan) -> bool:
    return torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


def test_rows_survive_growth_and_moves() -> None:
    rows = ActiveRows(CONFIG, torch.float32, max_rows=20)
    rows.reserve(2, 50)
    rows.write(1, 0, span(30))
    rows.write(1, 30, span(20, seed=1))
    rows.reserve(17, 700)
    assert rows.keys.shape[1] <= 20 and rows.keys.shape[-1] >= 700
    assert same(rows.read(1, 0, 30), span(30)) and same(rows.read(1, 30, 50), span(20, seed=1))
    rows.move(1, 16, 50)
    rows.clear(1)
    assert same(rows.read(16, 0, 30), span(30)) and not rows.keys[:, 1].any() and not rows.values[:, 1].any()


def test_cached_conversations_respect_their_budget() -> None:
    size = span(10).bytes
    cached = SessionCaches(budget=3 * size)
    for name in "abcd":
        cached.put(name, SessionCache(np.arange(11), span(10)))
    assert cached.get("a") is None and cached.get("b") is not None
    assert (cached.bytes, len(cached), cached.evicted) == (3 * size, 3, 1)
    cached.drop("b")
    cached.drop("never heard of")
    assert cached.bytes == 2 * size
    cached.put("huge", SessionCache(np.arange(41), span(40)))
    assert (cached.bytes, len(cached)) == (0, 0), "one beyond the budget is not kept, nor what was older"


def test_block_hashes_cover_everything_before_and_leave_a_token_to_compute() -> None:
    ids = np.arange(4 * PREFIX_BLOCK)
    assert len(block_hashes(ids)) == 3 and len(block_hashes(ids[:-1])) == 3
    assert len(block_hashes(ids[: PREFIX_BLOCK + 1])) == 1 and block_hashes(ids[:PREFIX_BLOCK]) == []
    other = ids.copy()
    other[0] += 1
    assert not set(block_hashes(ids)) & set(block_hashes(other))
    other = ids.copy()
    other[PREFIX_BLOCK] += 1
    assert block_hashes(ids)[:1] == block_hashes(other)[:1] and block_hashes(ids)[2] != block_hashes(other)[2]


def test_prefix_blocks_evict_tails_before_heads() -> None:
    size = span(PREFIX_BLOCK).bytes
    blocks = PrefixBlocks(budget=3 * size)
    chain = [b"head", b"middle", b"tail"]
    for digest in reversed(chain):
        blocks.put(digest, span(PREFIX_BLOCK))
    assert blocks.known(chain) == 3 and blocks.known([b"head", b"other", b"tail"]) == 1
    blocks.take(chain)
    blocks.put(b"new", span(PREFIX_BLOCK))
    assert blocks.known(chain) == 2 and blocks.bytes == 3 * size
