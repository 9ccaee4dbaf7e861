"""The fixed shapes that passes on a device come in, and the numbers of a pass over prompts laid out in one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnwise.engines.samplers.prompt_images import PromptImages

Numbers = NDArray[np.int32]
SMALLEST_PASS = 256
PASS_FACTORS = (1, 4, 8, 16, 32)
"""Sizes of a pass over prompts, in smallest ones."""
DECODE_ROWS = (16, 64, 128, 256, 384, 512, 768, 1024)
"""Few, because each is captured as a graph of its own, and multiples of 16, so that all take the same kernels."""
LEAST_ROWS, MOST_ROWS = 64, 512
"""Chunks in a pass; each that ends a prompt needs a row of logits."""


def decode_bucket(rows: int) -> int:
    """The next size of a decode batch."""
    return next((size for size in DECODE_ROWS if size >= rows), -(-rows // 512) * 512)


def decode_sizes(most: int) -> list[int]:
    """Every size that batches of up to so many rows take."""
    return sorted({decode_bucket(rows) for rows in (*(size for size in DECODE_ROWS if size < most), most)})


def pass_bucket(tokens: int, chunks: int, smallest: int) -> int:
    """The next size of a pass that takes so many tokens of so many chunks."""
    sizes = (smallest * factor for factor in PASS_FACTORS)
    fitting = (size for size in sizes if size >= tokens and pass_rows(size) >= chunks)
    return next(fitting, -(-tokens // (smallest * PASS_FACTORS[-1])) * smallest * PASS_FACTORS[-1])


def pass_sizes(most: int, smallest: int) -> list[int]:
    """Every size that passes of up to so many tokens take."""
    return sorted({pass_bucket(min(smallest * factor, most), 1, smallest) for factor in PASS_FACTORS})


def pass_rows(tokens: int) -> int:
    """The most chunks in a pass of this size."""
    return max(LEAST_ROWS, min(MOST_ROWS, tokens // 8))


def block_count(tokens: int, rows: int, block: int) -> int:
    """Blocks of queries that so many tokens of so many chunks can need: each chunk may end inside one."""
    return -(-tokens // block) + rows


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The next tokens of a prompt: where they begin, and whether they end it."""

    slot: int
    start: int
    tokens: NDArray[np.int64]
    last: bool
    prompt_images: PromptImages | None = None
    """Of a turn with images."""

    @property
    def end(self) -> int:
        """The position behind the chunk's last token, where the next chunk begins."""
        return self.start + len(self.tokens)


def packed_chunks(chunks: Sequence[PromptChunk], tokens: int, rows: int, block: int) -> Numbers:
    """All numbers of a pass in one array: ids, places and slots by token; first row, count, slot and place by block of
    queries; by chunk the slot that draws (-1: none) and its last row."""
    lengths = np.array([len(chunk.tokens) for chunk in chunks], dtype=np.int32)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
    slots = np.array([chunk.slot for chunk in chunks], dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    begins, total = ends - lengths, int(ends[-1])
    per_chunk = -(-lengths // block)
    count = int(per_chunk.sum())
    owner = np.repeat(np.arange(len(chunks)), per_chunk)
    within = (np.arange(count) - np.repeat(np.cumsum(per_chunk) - per_chunk, per_chunk)) * block
    blocks = block_count(tokens, rows, block)
    by_token = np.zeros((3, tokens), dtype=np.int32)
    by_token[2] = -1
    by_token[0, :total] = np.concatenate([chunk.tokens for chunk in chunks])
    by_token[1, :total] = np.arange(total) + np.repeat(starts - begins, lengths)
    by_token[2, :total] = np.repeat(slots, lengths)
    by_block = np.zeros((4, blocks), dtype=np.int32)
    by_block[0, :count] = begins[owner] + within
    by_block[1, :count] = np.minimum(lengths[owner] - within, block)
    by_block[2, :count] = slots[owner]
    by_block[3, :count] = starts[owner] + within
    by_row = np.zeros((2, rows), dtype=np.int32)
    by_row[0] = -1
    by_row[0, : len(chunks)] = np.where([chunk.last for chunk in chunks], slots, -1)
    by_row[1, : len(chunks)] = ends - 1
    return np.concatenate([by_token.ravel(), by_block.ravel(), by_row.ravel()])


def empty_pass(tokens: int, rows: int, block: int) -> Numbers:
    """A pass of this size in which nobody has a part, to try it with."""
    by_token = np.zeros((3, tokens), dtype=np.int32)
    by_token[2] = -1
    by_row = np.zeros((2, rows), dtype=np.int32)
    by_row[0] = -1
    return np.concatenate([by_token.ravel(), np.zeros(4 * block_count(tokens, rows, block), np.int32), by_row.ravel()])
