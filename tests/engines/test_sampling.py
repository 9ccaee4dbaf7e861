"""Noise is a function of key and position; tokens follow the distribution and never leave the allowed set."""

import numpy as np
import torch

from turnwise.engines.model.token_logprobs import token_logprobs
from turnwise.engines.samplers.request import NoiseKey, SamplingParams
from turnwise.engines.samplers.sampling import Rules, choose, uniforms


def noise(count: int, seed: int = 0) -> np.ndarray:
    return uniforms(np.full(count, NoiseKey(seed, 0, "s", 0).bits(), dtype=np.uint64), np.arange(count))


def draw(logits: torch.Tensor, count: int, **options: float) -> np.ndarray:
    params = SamplingParams(max_tokens=1, **options)  # type: ignore[arg-type]
    ids, _ = choose(logits.expand(count, -1), Rules.of([params] * count), noise(count))
    return ids.numpy()


def test_uniforms_are_known_numbers() -> None:
    # The first outputs of splitmix64 seeded with 0, cut to 53 bits.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    actual = uniforms(np.zeros(3, dtype=np.uint64), np.arange(3))
    assert actual.tolist() == [(value >> 11) * 2.0**-53 for value in expected]


def test_uniforms_are_flat_and_differ_by_key() -> None:
    first, second = noise(20000), noise(20000, seed=1)
    assert first.min() >= 0.0 and first.max() < 1.0
    counts = np.histogram(first, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, -2.0, 2.0, 0.5, -1.0, 1.5, -0.5]])
    for temperature in (1.0, 0.6, 1.7):
        probabilities = torch.softmax(logits[0].double() / temperature, -1).numpy()
        counts = np.bincount(draw(logits, 20000, temperature=temperature), minlength=8)
        expected = 20000 * probabilities
        assert ((counts - expected) ** 2 / expected).sum() < 24.3  # 7 degrees of freedom, p = 0.001


def test_top_k_and_top_p_stay_in_their_sets() -> None:
    logits = torch.log(torch.tensor([[0.05, 0.4, 0.05, 0.3, 0.2]]))
    assert set(draw(logits, 4000, top_k=2)) == {1, 3}
    assert set(draw(logits, 4000, top_p=0.69)) == {1, 3}
    assert set(draw(logits, 4000, top_p=0.71)) == {1, 3, 4}
    assert set(draw(logits, 4000, top_p=0.01)) == {1}
    assert set(draw(logits, 4000, top_k=4)) == {0, 1, 3, 4}, "of equal tokens the lower id stays"
    # Top-p counts within what top-k left: 0.4 of 0.7 is more than half.
    assert set(draw(logits, 4000, top_k=2, top_p=0.5)) == {1}
    counts = np.bincount(draw(logits, 20000, top_k=2), minlength=5)
    assert abs(counts[1] / 20000 - 4 / 7) < 0.015


def test_rows_of_a_batch_keep_their_own_rules() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4]])).expand(4, -1)
    params = [
        SamplingParams(1, temperature=0.0),
        SamplingParams(1, top_k=1),
        SamplingParams(1, temperature=2.0),
        SamplingParams(1),
    ]
    together = choose(logits, Rules.of(params), noise(4))
    for row in range(4):
        alone = choose(logits[row : row + 1], Rules.of([params[row]]), noise(4)[row : row + 1])
        assert together[0][row] == alone[0][0] and together[1][row] == alone[1][0]
    assert together[0][:2].tolist() == [3, 3]


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    assert draw(torch.tensor([[0.0, 3.0, 1.0, 3.0]]), 3, temperature=0.0).tolist() == [1, 1, 1]


def test_logprobs_are_those_before_the_filters() -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    for temperature in (0.0, 1.0, 0.7):
        params = SamplingParams(1, temperature=temperature, top_k=3, top_p=0.5)
        ids, logprobs = choose(logits, Rules.of([params] * 5), noise(5))
        assert torch.equal(logprobs, token_logprobs(logits, ids, temperature))
        wanted = torch.log_softmax(logits.double() / (temperature or 1.0), -1).gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(logprobs.double(), wanted, atol=1e-6, rtol=1e-6)


def test_noise_at_the_edges_finds_possible_tokens() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    rules = Rules.of([SamplingParams(1)])
    assert choose(logits, rules, np.array([0.0]))[0].item() == 1
    assert choose(logits, rules, np.array([1.0 - 2.0**-53]))[0].item() == 2


def test_nan_shows_in_the_logprob_of_its_row_only() -> None:
    logits = torch.zeros(3, 8)
    logits[1, 4] = torch.nan
    _, logprobs = choose(logits, Rules.of([SamplingParams(1)] * 3), noise(3))
    assert torch.isnan(logprobs).tolist() == [False, True, False]
