"""The fixed shapes that passes on a device come in, and the numbers of a pass over prompts laid out in one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int32]
SMALLEST_PASS = 256


def decode_bucket(rows: int) -> int:
    """The next size of a decode batch: powers of two, and from 256 on also those half-way between."""
    size = 1
    while size < rows:
        size *= 2
    return 3 * size // 4 if size > 256 and rows <= 3 * size // 4 else size


def pass_bucket(tokens: int, smallest: int) -> int:
    """The next size of a pass over prompts: doubled from the smallest on, and from 1,024 on also half-way between."""
    size = smallest
    while size < tokens:
        size *= 2
    return 3 * size // 4 if size > 1024 and tokens <= 3 * size // 4 else size


def chunk_bucket(chunks: int) -> int:
    """The next number of chunks in a pass."""
    size = 8
    while size < chunks:
        size *= 4
    return size


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The next tokens of a prompt: where they begin, and whether they end it."""

    slot: int
    start: int
    tokens: NDArray[np.int64]
    last: bool


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
    blocks = tokens // block + rows
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
