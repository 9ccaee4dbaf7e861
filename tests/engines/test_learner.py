"""The learner's gradients: packed, chunked, recomputed and accumulated ones are all the plain ones."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from batches import Loss, accumulate, batch_of, score
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from turnwise.config import LearnerConfig
from turnwise.config.choices import Aggregation, Decay, Precision
from turnwise.engines.learners.critic import Critic
from turnwise.engines.learners.learner import SUPERVISED, NotFinite, Objective, Who
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.learners.losses import PolicyTokens
from turnwise.engines.learners.optimizer import lr_at
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.huggingface_folder import DecoderConfig, layout
from turnwise.engines.model.policy_model import Mixing, ModelInputs
from turnwise.errors import EngineError

LENGTHS = [19, 7, 33, 12]


def copy_of(decoder: Decoder) -> Decoder:
    return Decoder(decoder.config, {name: tensor.clone() for name, tensor in decoder.tensors().items()})


def learner_of(decoder: Decoder, temperature: float = 0.8, **options: Any) -> LocalLearner:
    given = {name: options.pop(name) for name in ("updates", "regime", "chunk_tokens") if name in options}
    config = LearnerConfig(**{"lr": 1e-2, "grad_clip": math.inf, **options})
    return LocalLearner(copy_of(decoder), config, temperature=temperature, **given)


def batch(lengths: list[int] = LENGTHS, seed: int = 0, vocab: int = 96) -> tuple[Tensor, list[int], Tensor]:
    """Sequences with a prompt, policy tokens, two tool tokens, policy tokens, and a tail the policy did not write."""
    tokens = torch.randint(0, vocab, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    policy: list[int] = []
    start = 0
    for length in lengths:
        policy += [start + i for i in range(2, length - 1) if i % 6 not in (3, 4)]
        start += length
    return tokens, lengths, torch.tensor(policy)


def weighted(count: int, entropy: float = 0.3) -> Loss:
    """A loss in which every token counts differently."""
    weights = torch.linspace(-1.0, 2.0, count)

    def loss(found: PolicyTokens) -> tuple[Tensor, dict[str, float]]:
        total = -(weights * found.logprobs + entropy * weights.square() * found.entropy).sum() / count
        return total, {"entropy": found.entropy.mean().item()}

    return loss


def gradients(learner: LocalLearner) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in learner.model.named_parameters() if p.grad is not None}
    assert found
    return found


def run(learner: LocalLearner, case: tuple[Tensor, list[int], Tensor], loss: Loss | None = None) -> dict[str, float]:
    return accumulate(learner, case, loss or weighted(len(case[2])))


def same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def plain(decoder: Decoder, case: tuple[Tensor, list[int], Tensor], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies one sequence at a time, with a mask, full logits and nothing clever."""
    tokens, lengths, index = case
    logprobs, entropies = [], []
    for part in torch.split(tokens, lengths):
        hidden = decoder(ModelInputs(part, torch.arange(len(part))), naive_attention)
        every = torch.log_softmax(decoder.logits(hidden) / temperature, -1)
        logprobs.append(functional.pad(every[:-1].gather(1, part[1:, None]).squeeze(1), (1, 0)))
        entropies.append(functional.pad(-(every.exp() * every).sum(-1)[:-1], (1, 0)))
    return torch.cat(logprobs)[index], torch.cat(entropies)[index]


def naive_attention(layer: int, q: Tensor, k: Tensor, v: Tensor, mixing: Mixing) -> Tensor:
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[2] ** 0.5
    scores = scores.masked_fill(torch.ones(len(q), len(q), dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(len(q), -1)


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_packed_equals_single_sequences(decoder: Decoder, temperature: float) -> None:
    case = batch()
    learner = learner_of(decoder, temperature)
    metrics = run(learner, case)
    reference = copy_of(decoder)
    logprobs, entropy = plain(reference, case, temperature)
    loss, expected = weighted(len(case[2]))(PolicyTokens(logprobs, entropy, None))
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["entropy"] == pytest.approx(expected["entropy"], abs=1e-5)
    same(gradients(learner), {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}, 1e-5)
    torch.testing.assert_close(score(learner, case), logprobs.detach(), atol=1e-5, rtol=1e-5)


def test_gradients_are_those_of_transformers(decoder: Decoder, tmp_path: Path) -> None:
    """An independent witness: nothing of ours computes on the other side."""
    case = batch()
    learner = learner_of(decoder, 1.0)
    run(learner, case)
    decoder.save(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens, lengths, index = case
    every = [torch.log_softmax(model(part[None]).logits[0], -1) for part in torch.split(tokens, lengths)]
    before = torch.cat(every)[index - 1]
    logprobs, entropy = before.gather(1, tokens[index, None]).squeeze(1), -(before.exp() * before).sum(-1)
    weighted(len(index))(PolicyTokens(logprobs, entropy, None))[0].backward()
    ours = gradients(learner)
    for part in layout(decoder.config):
        theirs = torch.cat([model.get_parameter(name).grad for name, _ in part.sources])
        assert float(theirs.abs().max()) > 1e-3
        torch.testing.assert_close(ours[part.name], theirs, atol=2e-4, rtol=1e-3)


def test_temperature_zero_is_unscaled(decoder: Decoder) -> None:
    case = batch()
    assert torch.equal(score(learner_of(decoder, 0.0), case), score(learner_of(decoder, 1.0), case))


@pytest.mark.parametrize("chunk", [1, 7, 16, 10_000])
def test_chunk_size_does_not_matter(decoder: Decoder, chunk: int) -> None:
    case = batch()
    one, other = learner_of(decoder), learner_of(decoder, chunk_tokens=chunk)
    assert run(one, case)["loss"] == pytest.approx(run(other, case)["loss"], abs=1e-6)
    same(gradients(one), gradients(other), 1e-6)


class LogitsWatch(TorchDispatchMode):
    """Notes the row count of every tensor that is as wide as the vocabulary, the transposed head aside."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self._vocab, self._hidden = vocab, hidden
        self.rows: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() == 2 and out.shape[1] == self._vocab and len(out) != self._hidden:
            self.rows.add(len(out))
        return out


def test_logits_are_never_held_at_once(decoder: Decoder) -> None:
    case = batch()
    for chunk, expected in ((10, {10, 7}), (1000, {37})):
        learner = learner_of(decoder, chunk_tokens=chunk)
        with LogitsWatch(decoder.config.vocab_size, decoder.config.hidden_size) as watch:
            run(learner, case)
        assert watch.rows == expected


def test_recomputing_layers_changes_nothing(decoder: Decoder) -> None:
    case = batch()
    one, other = learner_of(decoder), learner_of(decoder, gradient_checkpointing=True)
    assert run(one, case) == run(other, case)
    same(gradients(one), gradients(other), 0.0)


def test_accumulation_equals_one_batch(decoder: Decoder) -> None:
    tokens, lengths, index = batch()
    together, apart = learner_of(decoder), learner_of(decoder)
    weights = torch.linspace(-1.0, 2.0, len(index))
    for_all = weighted(len(index), entropy=0.0)
    run(together, (tokens, lengths, index), for_all)
    begin = 0
    for some in ([0, 1], [2], [3]):
        count = sum(lengths[i] for i in some)
        inside = (index >= begin) & (index < begin + count)

        def loss(found: PolicyTokens, inside: Tensor = inside) -> tuple[Tensor, dict[str, float]]:
            return -(weights[inside] * found.logprobs).sum() / len(index), {}

        part = (tokens[begin : begin + count], [lengths[i] for i in some], index[inside] - begin)
        accumulate(apart, part, loss)
        begin += count
    same(gradients(together), gradients(apart), 1e-6)
    one, two = together.optim_step(), apart.optim_step()
    assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-5)
    assert together.step == apart.step == 1


def arrays(count: int, seed: int = 3) -> dict[str, np.ndarray]:
    """What a step might say of so many policy tokens."""
    noise = np.random.default_rng(seed)
    return {"advantages": noise.normal(0, 1, count), "old_logprobs": -noise.uniform(0.5, 6.0, count),
            "ref_logprobs": -noise.uniform(0.5, 6.0, count)}  # fmt: skip


OBJECTIVES = (
    Objective("ppo_clip", entropy=0.01, kl_loss=0.1),
    Objective("gspo", aggregation=Aggregation.sequence_mean_token_mean),
    SUPERVISED,
)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.loss)
def test_an_update_in_micro_batches_is_the_update_of_one_batch(decoder: Decoder, objective: Objective) -> None:
    tokens, lengths, index = batch()
    whole = batch_of(tokens, lengths, index, **arrays(len(index)))
    parts, ends = [], np.cumsum(lengths)
    for first, last in ((0, 2), (2, 3), (3, 4)):
        begin, end = int(ends[first] - lengths[first]), int(ends[last - 1])
        inside = (index >= begin) & (index < end)
        cut = {name: values[inside.numpy()] for name, values in arrays(len(index)).items()}
        part = batch_of(tokens[begin:end], lengths[first:last], index[inside] - begin, **cut)
        parts.append(replace(part, minibatch_tokens=len(index), minibatch_trajectories=len(lengths)))
    together, apart = learner_of(decoder, grad_clip=0.5), learner_of(decoder, grad_clip=0.5)
    one, several = together.update([whole], objective), apart.update(parts, objective)
    assert one.metrics == pytest.approx(several.metrics, rel=1e-4, abs=1e-6)
    assert one.metrics["grad_norm"] > 0.5 and one.metrics["lr"] == 1e-2
    assert [len(found.logprobs) for found in several.outputs] == [len(part.index) for part in parts]
    for name in ("logprobs", "entropies"):
        joined = np.concatenate([getattr(found, name) for found in several.outputs])
        np.testing.assert_allclose(getattr(one.outputs[0], name), joined, atol=1e-5)
    before = score(learner_of(decoder), (tokens, lengths, index))
    np.testing.assert_allclose(one.outputs[0].logprobs, before, atol=1e-6)  # as it was before the update
    after = [score(learner, (tokens, lengths, index)) for learner in (together, apart)]
    torch.testing.assert_close(after[0], after[1], atol=1e-3, rtol=1e-3)
    assert (after[0] - before).abs().max() > 0.1


@pytest.mark.parametrize("recompute", [False, True])
def test_a_model_that_cannot_pack_learns_the_same_one_sequence_at_a_time(decoder: Decoder, recompute: bool) -> None:
    tokens, lengths, index = batch([19, 7, 33, 12])
    index = index[(index < 19) | (index >= 26)]  # the second sequence has no policy token
    given = batch_of(tokens, lengths, index, **arrays(len(index)), returns=np.ones(len(index)), values=index.numpy())
    results = []
    for no_packing in (None, "layer 1 is recurrent"):
        policy = copy_of(decoder)
        policy.shape = replace(policy.shape, no_packing=no_packing)
        config = LearnerConfig(lr=1e-2, critic_lr=1e-2, gradient_checkpointing=recompute)
        learner = LocalLearner(policy, config, temperature=0.8, critic=Critic.copying(policy), reference=True)
        seen: list[int] = []
        for model in (learner.model, learner.critic.trunk if learner.critic else None):
            assert isinstance(model, Decoder)
            model.register_forward_pre_hook(lambda module, given, seen=seen: seen.append(len(given[0].tokens)))
        updates = [learner.update([given], OBJECTIVES[0]) for _ in range(3)]
        assert seen == ([71] * 6 if no_packing is None else [19, 33, 12] * 6)
        scores = {who: learner.score(given, who) for who in (Who.POLICY, Who.REFERENCE, Who.CRITIC)}
        results.append(([u.metrics for u in updates], scores))
    (metrics, scores), (apart, apart_scores) = results
    for one, two in zip(metrics, apart, strict=True):
        assert one == pytest.approx(two, rel=1e-3, abs=1e-5)
    for who, found in scores.items():
        np.testing.assert_allclose(apart_scores[who], found, atol=2e-3)
    assert np.abs(scores[Who.POLICY] - scores[Who.REFERENCE]).max() > 0.1


def test_what_the_policy_did_not_write_gets_no_gradient(decoder: Decoder) -> None:
    """Every token id is used once, so each row of the embedding tells of one place."""
    wide = Decoder.fresh(replace(decoder.config, vocab_size=200), 5)
    learner = learner_of(wide, weight_decay=0.0)
    lengths = [20, 15, 25]
    tokens = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:60]
    # The second sequence has no policy token; the others end with what a tool said.
    index = torch.tensor([*range(5, 9), *range(14, 17), *range(35 + 4, 35 + 20)])
    run(learner, (tokens, lengths, index), weighted(len(index)))
    rows = gradients(learner)["embed"].abs().sum(1)
    # A place is read by what comes after it: up to the place before the last policy token, and nothing else.
    read = [*range(0, 16), *range(35, 35 + 19)]
    silent = sorted(set(range(60)) - set(read))
    assert (rows[tokens[read]] > 0).all()
    assert rows[tokens[silent]].tolist() == [0.0] * len(silent)
    assert rows[[i for i in range(200) if i not in set(tokens.tolist())]].sum() == 0.0


def test_tokens_with_weight_zero_leave_no_trace(decoder: Decoder) -> None:
    learner = learner_of(decoder)
    case = batch()
    keep = torch.zeros(len(case[2]))

    def loss(found: PolicyTokens) -> tuple[Tensor, dict[str, float]]:
        return (keep * found.logprobs).sum(), {}

    run(learner, case, loss)
    assert all(float(gradient.abs().max()) == 0.0 for gradient in gradients(learner).values())


def test_adamw_steps_are_torchs_with_decay_on_matrices_only(decoder: Decoder) -> None:
    learner = learner_of(decoder, lr=1e-3, weight_decay=0.5, grad_clip=0.7)
    mirror = dict(copy_of(decoder).named_parameters())
    decayed = [{"params": [p for p in mirror.values() if p.dim() == 2], "weight_decay": 0.5},
               {"params": [p for p in mirror.values() if p.dim() == 1], "weight_decay": 0.0}]  # fmt: skip
    adamw = torch.optim.AdamW(decayed, lr=1e-3)
    for seed in range(3):
        run(learner, batch(seed=seed))
        for name, gradient in gradients(learner).items():
            mirror[name].grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(mirror.values(), 0.7)
        adamw.step()
        metrics = learner.optim_step()
        assert norm > 0.7 and metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    for name, parameter in learner.model.named_parameters():
        torch.testing.assert_close(parameter, mirror[name], atol=1e-5, rtol=1e-4)
        assert parameter.grad is None


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        (Decay.constant, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (Decay.linear, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        (Decay.cosine, [0.5, 1.0, 1.0, 0.85355, 0.5, 0.14645, 0.0, 0.0]),
    ],
)
def test_learning_rate(decay: Decay, expected: list[float], decoder: Decoder) -> None:
    config = LearnerConfig(warmup=2, decay=decay)
    assert [lr_at(step, 2.0, config, 6) / 2.0 for step in range(8)] == pytest.approx(expected, abs=1e-5)
    learner = learner_of(decoder, lr=1e-3, warmup=2, decay=decay, updates=6)
    for step in range(3):
        run(learner, batch())
        assert learner.optim_step()["lr"] == pytest.approx(1e-3 * expected[step])


def test_fine_tuning_has_its_schedule_and_moments(decoder: Decoder) -> None:
    """Warm-up, then a cosine to a tenth, with moments that forget faster."""
    config = LearnerConfig(lr=2.0, warmup=2, decay=Decay.cosine, min_lr_ratio=0.1)
    found = [lr_at(step, config.lr, config, 6) for step in range(8)]
    assert found == pytest.approx([1.0, 2.0, 2.0, 1.73640, 1.1, 0.46360, 0.2, 0.2], abs=1e-4)
    mirror, learner = copy_of(decoder), learner_of(decoder, lr=1e-3, beta2=0.5)
    adamw = torch.optim.AdamW(mirror.parameters(), lr=1e-3, betas=(0.9, 0.5), weight_decay=0.0)
    for seed in range(3):
        run(learner, batch(seed=seed))
        for name, gradient in gradients(learner).items():
            mirror.get_parameter(name).grad = gradient
        adamw.step()
        learner.optim_step()
    same(dict(learner.model.named_parameters()), dict(mirror.named_parameters()), 1e-5)


def test_training_raises_the_chosen_tokens(decoder: Decoder) -> None:
    learner = learner_of(decoder, 1.0, lr=3e-3)
    case = batch()

    def loss(found: PolicyTokens) -> tuple[Tensor, dict[str, float]]:
        return -found.logprobs.mean(), {}

    losses = []
    for _ in range(12):
        losses.append(run(learner, case, loss)["loss"])
        learner.optim_step()
    assert losses[-1] < 0.5 * losses[0]
    assert -float(score(learner, case).mean()) < losses[-1]


def weights_of(learner: LocalLearner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.model.tensors().items()}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_before_any_change(decoder: Decoder, bad: float) -> None:
    learner = learner_of(decoder)
    before = weights_of(learner)
    case = batch()
    batches = [batch_of(*case, advantages=[scale] * len(case[2])) for scale in (1.0, bad, 1.0)]
    with pytest.raises(NotFinite, match="loss is -?(nan|inf)"):
        learner.update(batches, Objective(loss="reinforce"))
    same(before, weights_of(learner), 0.0)
    assert all(parameter.grad is None for parameter in learner.model.parameters())


def test_a_gradient_that_is_not_finite_stops_before_any_change(decoder: Decoder) -> None:
    learner = learner_of(decoder)
    before = weights_of(learner)

    def loss(found: PolicyTokens) -> tuple[Tensor, dict[str, float]]:
        return (found.logprobs - found.logprobs.detach()).square().sum().sqrt(), {}  # 0, with slope 0 / 0

    assert run(learner, batch(), loss)["loss"] == 0.0
    with pytest.raises(NotFinite, match="embed"):
        learner.optim_step()
    same(before, weights_of(learner), 0.0)
    run(learner, batch())  # and it can go on
    assert learner.optim_step()["grad_norm"] > 0
    assert learner.step == 1


@pytest.mark.parametrize(
    ("tokens", "lengths", "index", "words"),
    [
        ([1, 2, 3], [2], [1], "lengths"),
        ([1, 2, 3], [3, 0], [1], "lengths"),
        ([1, 2, 3], [2, 1], [2], "starts with a policy token"),
        ([1, 2, 3], [3], [], "no token"),
        ([1, 2, 3], [3], [3], "outside"),
        ([1, 2, 3], [3], [2, 1], "rise"),
    ],
)
def test_bad_batches_are_refused(
    decoder: Decoder, tokens: list[int], lengths: list[int], index: list[int], words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        score(learner_of(decoder), (torch.tensor(tokens), lengths, torch.tensor(index, dtype=torch.long)))


def test_narrow_weights_are_not_trained() -> None:
    narrow = Decoder.fresh(DecoderConfig("qwen3", 96, 64, 128, 2, 4, 2, 16, 512), 1, torch.bfloat16)
    with pytest.raises(EngineError, match="float32"):
        learner_of(narrow)


def test_bfloat16_products_train_float32_weights() -> None:
    soft = Decoder.fresh(DecoderConfig("qwen3", 96, 64, 128, 2, 4, 2, 16, 512), 1)
    wide, narrow = learner_of(soft), learner_of(soft, precision=Precision.bfloat16, chunk_tokens=16)
    case = batch()
    losses = [run(learner, case)["loss"] for learner in (wide, narrow)]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], abs=0.02)
    for name, gradient in gradients(narrow).items():
        exact = gradients(wide)[name]
        assert gradient.dtype == torch.float32
        assert functional.cosine_similarity(gradient.flatten(), exact.flatten(), dim=0) > 0.99, name
    narrow.optim_step()
    assert {parameter.dtype for parameter in narrow.model.parameters()} == {torch.float32}
