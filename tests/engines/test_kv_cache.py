"""Rows grow without losing content; cached and shared caches stay within their bytes and forget the oldest first."""

from dataclasses import replace

import numpy as np
import torch

from turnwise.engines.model.policy_model import LayerCache
from turnwise.engines.samplers.kv_cache import (
    PREFIX_BLOCK,
    ActiveRows,
    KVSpan,
    PrefixBlocks,
    PromptBlock,
    SessionCache,
    SessionCaches,
    block_hashes,
    prompt_blocks,
)

CACHES = (LayerCache(1, 8, 8),) * 2


def span(length: int, seed: int = 0) -> KVSpan:
    noise = torch.Generator().manual_seed(seed)
    shapes = ((2, 1, 8, length), (2, 1, length, 8))
    return KVSpan(length, *((torch.randn(shape, generator=noise),) for shape in shapes))


def same(a: KVSpan, b: KVSpan) -> bool:
    pairs = zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def test_rows_survive_growth_and_moves() -> None:
    rows = ActiveRows(CACHES, torch.float32, max_rows=20)
    rows.reserve(2, 50)
    rows.write(1, 0, span(30))
    rows.write(1, 30, span(20, seed=1))
    rows.reserve(17, 700)
    assert rows.keys[0].shape[1] <= 20 and rows.keys[0].shape[-1] >= 700
    assert same(rows.read(1, 0, 30), span(30)) and same(rows.read(1, 30, 50), span(20, seed=1))
    rows.move(1, 16, 50)
    rows.clear(1)
    assert same(rows.read(16, 0, 30), span(30)) and not rows.keys[0][:, 1].any() and not rows.values[0][:, 1].any()


def test_layers_that_keep_unlike_things_lie_apart_and_come_back_in_order() -> None:
    wide, narrow = LayerCache(2, 6, 4), LayerCache(1, 8, 8)
    rows = ActiveRows((wide, narrow, wide), torch.float32, max_rows=4)
    rows.reserve(3, 40)
    for number, (keys, values) in enumerate(rows.layers, start=1):
        keys[1, :, :, :40], values[1, :, :40] = number, -number
    kept = rows.read(1, 0, 40)
    assert [tuple(part.shape) for part in kept.keys] == [(2, 2, 6, 40), (1, 1, 8, 40)] and kept.length == 40
    assert kept.bytes == 40 * 4 * (2 * (2 * 6 + 2 * 4) + (8 + 8))
    rows.reserve(4, 100)
    rows.write(3, 5, kept)
    assert [keys[3, 0, 0, 5].item() for keys, _ in rows.layers] == [1.0, 2.0, 3.0]
    assert [values[3, 0, 44, 0].item() for _, values in rows.layers] == [-1.0, -2.0, -3.0]
    assert [keys.shape[1] for keys, _ in rows.layers] == [2, 1, 2] and not rows.layers[0][0][3, :, :, 45:].any()


def test_cached_conversations_respect_their_budget() -> None:
    size = span(10).bytes
    cached = SessionCaches(budget=3 * size)
    for name in "abcd":
        cached.put(name, SessionCache(np.arange(11), span(10)))
    assert cached.get("a") is None and cached.get("b") is not None
    assert (cached.bytes, len(cached)) == (3 * size, 3)
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
    chain = [PromptBlock(digest, 0, PREFIX_BLOCK) for digest in (b"head", b"middle", b"tail")]
    for block in reversed(chain):
        blocks.put(block.digest, span(PREFIX_BLOCK))
    assert blocks.known(chain) == 3 and blocks.known([chain[0], replace(chain[1], digest=b"other"), chain[2]]) == 1
    blocks.take(chain)
    blocks.put(b"new", span(PREFIX_BLOCK))
    assert blocks.known(chain) == 2 and blocks.bytes == 3 * size


def test_a_prompt_is_shared_by_its_blocks_or_as_a_whole() -> None:
    ids = np.arange(3 * PREFIX_BLOCK + 5)
    parts, (whole,) = prompt_blocks(ids), prompt_blocks(ids, whole=True)
    assert [(block.start, block.end) for block in parts] == [
        (n * PREFIX_BLOCK, (n + 1) * PREFIX_BLOCK) for n in range(3)
    ]
    assert whole == PromptBlock(parts[-1].digest, 0, 3 * PREFIX_BLOCK)
    assert prompt_blocks(ids[:PREFIX_BLOCK], whole=True) == []
