"""A batch that does not fit is halved until it does, with the result of the whole; budgets come from bytes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from batches import batch_of
from test_working_weights import LENGTHS, PPO, batch, learner_of

from turnwise.config import LearnerConfig
from turnwise.config.choices import Aggregation
from turnwise.engines.devices import TOKEN_BUDGET
from turnwise.engines.learners.activation_memory import (
    SHARE,
    STEP,
    WANTED_TOKENS,
    ActivationMemory,
    PassMemory,
    choose,
    estimate,
)
from turnwise.engines.learners.learner import SUPERVISED, Objective, Who
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.learners.splitting import halves, whole
from turnwise.engines.memory_plan import LARGEST_BUDGET
from turnwise.engines.model.decoder import Decoder
from turnwise.errors import EngineError

OBJECTIVES = (PPO, Objective("gspo", aggregation=Aggregation.sequence_mean_token_mean), SUPERVISED)


def limit(learner: LocalLearner, tokens: int, *, in_backward: bool = False) -> None:
    """Let the model run out of memory as a GPU does: with more tokens than that, before or behind its layers."""

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")

    def before(module: Any, given: tuple[Any, ...]) -> None:
        if len(given[0].tokens) > tokens:
            refuse()

    def each(module: Any, given: tuple[Any, ...], hidden: torch.Tensor) -> None:
        if len(given[0]) > tokens and hidden.requires_grad:
            hidden.register_hook(refuse)

    if in_backward:
        layers = learner.model.layers
        assert isinstance(layers, torch.nn.ModuleList)
        layers[0].register_forward_hook(each)
    else:
        learner.model.register_forward_pre_hook(before)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.loss)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_backward", [False, True])
def test_what_does_not_fit_is_halved_with_the_same_result(
    decoder: Decoder, objective: Objective, dtype: torch.dtype, in_backward: bool
) -> None:
    said: list[str] = []
    free, tight = learner_of(decoder, dtype), learner_of(decoder, dtype, warn=said.append)
    limit(tight, 46, in_backward=in_backward)
    given = [batch(seed=1), batch([9, 30, 11], seed=2)]
    one, two = free.update(given, objective), tight.update(given, objective)
    close = {"rel": 1e-4, "abs": 1e-6} if dtype is torch.float32 else {"rel": 0.02, "abs": 0.01}
    assert two.metrics == pytest.approx(one.metrics, **close)
    for mine, expected in zip(two.outputs, one.outputs, strict=True):
        for name in ("logprobs", "entropies"):
            difference = np.abs(getattr(mine, name) - getattr(expected, name))
            assert difference.max() <= (1e-4 if dtype is torch.float32 else 0.3) and difference.mean() < 0.05
    for name, tensor in free.state()[0].items():
        if dtype is torch.float32 and name.startswith("policy."):
            torch.testing.assert_close(tight.state()[0][name], tensor, atol=2e-4, rtol=1e-3)
    assert len(said) == 1 and "a pass over 71 tokens does not fit" in said[0] and "at most 35 tokens" in said[0]
    assert tight.token_budget == 35 and free.token_budget == TOKEN_BUDGET


def test_scores_are_laid_back_in_order(decoder: Decoder) -> None:
    free, tight = learner_of(decoder), learner_of(decoder, warn=lambda text: None)
    limit(tight, 34)
    np.testing.assert_allclose(tight.score(batch(), Who.POLICY), free.score(batch(), Who.POLICY), atol=0.2)
    wide, apart = (learner_of(decoder, torch.float32, warn=lambda text: None) for _ in range(2))
    limit(apart, 34)
    np.testing.assert_allclose(apart.score(batch(), Who.POLICY), wide.score(batch(), Who.POLICY), atol=1e-5)


def test_a_trajectory_that_never_fits_is_an_error_and_changes_nothing(decoder: Decoder) -> None:
    learner = learner_of(decoder, warn=lambda text: None)
    before = {name: tensor.clone() for name, tensor in learner.state()[0].items()}
    limit(learner, 20)
    with pytest.raises(EngineError, match="single trajectory of 33 tokens does not fit.*Tried to allocate 2.00 GiB.$"):
        learner.update([batch()], PPO)
    after = learner.state()[0]
    assert learner.step == 0 and all(torch.equal(before[name], after[name]) for name in before)


def test_halves_hold_whole_trajectories() -> None:
    tokens, lengths = torch.arange(60), [10, 5, 15, 10, 20]
    index = torch.tensor([3, 4, 16, 20, 21, 35, 45, 46, 59])
    # The first and the fourth sequence are segments of one trajectory; the second has nothing of the policy's.
    owners, counts = np.array([2, 2, 0, 0, 0, 2, 1, 1, 1]), np.array([3, 3, 3])
    given = replace(
        batch_of(tokens, lengths, index, advantages=np.arange(9)), trajectory=owners, trajectory_tokens=counts
    )
    one, two = halves(whole(given))
    assert [one.batch.lengths.tolist(), two.batch.lengths.tolist()] == [[10, 10], [15, 20]]
    assert sorted([*one.places, *two.places]) == list(range(9))
    for part in (one, two):
        np.testing.assert_array_equal(part.batch.tokens[part.batch.index], given.tokens[given.index[part.places]])
        assert part.batch.advantages is not None and given.advantages is not None
        np.testing.assert_array_equal(part.batch.advantages, given.advantages[part.places])
        counts = np.bincount(part.batch.trajectory, minlength=len(part.batch.trajectory_tokens))
        assert counts.tolist() == part.batch.trajectory_tokens.tolist() and part.batch.minibatch_tokens == 9
    (alone,) = halves(one)
    assert alone is one


def test_budgets_come_from_bytes() -> None:
    memory = PassMemory(layers=30, kept=20_000, entering=1_000, outside=5_000)
    assert choose(memory, 1e12, None) == (LARGEST_BUDGET, 0)
    tokens, layers = choose(memory, 20_000 * 605.0 * 1000, None)
    assert layers == 0 and tokens % STEP == 0 and tokens >= WANTED_TOKENS
    tokens, layers = choose(memory, 605_000 * 10_000.0, None)
    assert 0 < layers < 30 and tokens >= WANTED_TOKENS
    assert memory.per_token(layers) * tokens <= 605_000 * 10_000
    assert choose(memory, 605_000 * 10_000.0, 0) == (9 * STEP, 0)
    assert choose(memory, 1.0, None) == (STEP, 30)
    assert memory.per_token(30) < memory.per_token(29) < memory.per_token(0)


def test_the_estimate_follows_the_models_shape(decoder: Decoder) -> None:
    found, c = estimate(decoder), decoder.config
    numbers = c.hidden_size * 4 + (c.num_heads + 2 * c.num_kv_heads) * c.head_dim + 2 * c.intermediate_size
    assert found.layers == c.num_layers and 4 * numbers < found.kept < 12 * numbers
    assert sum(LENGTHS) < STEP, "small batches are not measured"


def test_a_pass_of_as_many_tokens_as_were_asked_for_computes_again_what_it_must(decoder: Decoder) -> None:
    def memory(tokens: int, room: int, **knobs: Any) -> ActivationMemory:
        config, gpu = LearnerConfig(token_budget=tokens, **knobs), torch.device("cuda")  # not touched: room is given
        numbers = {"gradients": 0, "moments_to_come": lambda: 0, "logit_bytes": 0, "memory_bytes": room}
        return ActivationMemory([decoder], config, gpu, **numbers)

    found, layers = estimate(decoder), decoder.config.num_layers
    ample, tight = (int(8192 * found.per_token(again) / SHARE) + 8192 for again in (0, layers))
    assert memory(8192, ample).layers_again(8192) == 0
    assert memory(8192, tight).layers_again(8192) == layers == memory(8192, 1).layers_again(8192)
    assert memory(8192, tight).layers_again(64) == 0, "a small pass has room"
    assert memory(8192, tight, gradient_checkpointing=False).layers_again(8192) == 0
    assert memory(8192, ample, gradient_checkpointing=True).layers_again(8192) == layers
