"""A completion as plain values that tests can compare: `await write(sampler, "c0", [1, 2], SamplingParams(9), key)`."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.engines.samplers.sampler import Sampler
from turnwise.types import FinishReason


class Written(NamedTuple):
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int


async def write(
    sampler: Sampler, conversation: str, token_ids: Sequence[int], params: SamplingParams, noise: NoiseKey
) -> Written:
    """One turn of a sampler."""
    done = await sampler.generate(Request(conversation, np.array(token_ids, dtype=np.int64), params, noise))
    return Written(
        tuple(done.token_ids.tolist()), tuple(done.logprobs.tolist()), done.finish_reason, done.policy_version
    )


def letters(token_ids: Sequence[int]) -> str:
    """Text for tests: token 33 is `A`, 34 is `B`; never a tokenizer's business here."""
    return "".join(chr(32 + i) for i in token_ids)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens of the small vocabulary."""
    ids: list[int] = np.random.default_rng(seed).integers(96, size=length).tolist()
    return ids


def key(sibling: int = 0, sample: str = "s") -> NoiseKey:
    """The noise of one of a sample's siblings."""
    return NoiseKey(0, 1, sample, sibling)
