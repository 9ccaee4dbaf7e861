"""Experts that one pass noted are taken in another: weights and gradients are those of the own router, for them."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import EXPERTS, build
from torch import Tensor
from written import letters, prompt

from turnwise.commands.cli import main
from turnwise.config import LearnerConfig
from turnwise.engines.learners.learner import Objective, TokenBatch, Who
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.learners.splitting import halves, whole
from turnwise.engines.model.attention import Regime, packed, positions
from turnwise.engines.model.policy_model import ModelInputs
from turnwise.engines.model.recurrence import Recurrence
from turnwise.engines.model.routing import RouterShape, Routing, expert_dtype
from turnwise.engines.model.transformers.model import TransformersModel
from turnwise.engines.model.transformers.routers import within
from turnwise.engines.samplers.cpu.torch_cpu import TorchSampler
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.engines.weight_updates import FullWeights
from turnwise.errors import EngineError
from turnwise.types import Completion

FOLLOWED: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen3_moe": (1, {}),
    "mixtral": (2, {}),
    "gpt_oss": (2, {}),
    "deepseek_v3": (1, {"n_group": 2}),
    "qwen3_5_moe_text": (2, {}),
    "granitemoehybrid": (2, {}),
    "lfm2_moe": (1, EXPERTS | {"num_experts": 4, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
}
"""Families, and how many routers their tiny models have."""
TOKENS, LENGTHS = torch.tensor(prompt(20)), (12, 8)


def states(model: TransformersModel, routing: Routing | None, recompute: int = 0) -> Tensor:
    recurrence = Recurrence(LENGTHS) if model.shape.states else None
    inputs = ModelInputs(TOKENS, positions(LENGTHS), recurrence=recurrence, routing=routing)
    return model(inputs, packed(LENGTHS), recompute=recompute)


def gradients(model: TransformersModel, routing: Routing | None, recompute: int = 0) -> dict[str, Tensor]:
    model.zero_grad()
    states(model, routing, recompute).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", FOLLOWED)
def test_what_a_pass_noted_gives_its_states_and_gradients_again(kind: str) -> None:
    count, changes = FOLLOWED[kind]
    model = TransformersModel(build(kind, **changes))
    plain = gradients(model, None)
    model.follow_routers()
    model.follow_routers()
    assert model.shape.routers == (RouterShape(4, 2),) * count
    noted = Routing()
    assert torch.equal(states(model, noted), states(model, None))
    given = noted.noted(torch.uint8)
    assert given.shape == (20, count, 2)
    for recompute in (0, True):
        again = gradients(model, Routing(given), recompute)
        assert again.keys() == plain.keys() and all(torch.equal(again[name], plain[name]) for name in plain)
    others = gradients(model, Routing((given + 1) % 4), recompute=0)
    kept = gradients(model, Routing((given + 1) % 4), recompute=True)
    assert any(not torch.equal(others[name], plain[name]) for name in plain)
    assert all(torch.equal(others[name], kept[name]) for name in others)
    unknown = torch.full_like(given, 255)
    unknown[5] = (given[5] + 1) % 4
    changed = (states(model, Routing(unknown)) != states(model, None)).any(-1)
    assert not changed[:5].any() and changed[5] and not changed[12:].any()


def test_weights_of_given_experts_are_those_of_the_own_router() -> None:
    model = TransformersModel(build("qwen3_moe", norm_topk_prob=True))
    model.follow_routers()
    router: Any = next(module for name, module in model.named_modules() if name.endswith("mlp.gate"))
    x, given = torch.randn(5, 32), torch.tensor([[3, 0], [1, 2], [0, 1], [2, 3], [3, 1]])
    with within(Routing(given[:, None])):
        _, weights, chosen = router(x)
    expected = torch.softmax(x @ router.weight.t(), -1).gather(1, given)
    assert torch.equal(chosen, given)
    assert torch.allclose(weights, expected / expected.sum(-1, keepdim=True), atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("qwen3", {}, "Qwen3ForCausalLM has no routers"),
        ("jetmoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8}, "JetMoeTopKGating makes"),
    ],
)
def test_routers_that_cannot_be_told_are_refused_by_name(kind: str, changes: dict[str, Any], words: str) -> None:
    model = TransformersModel(build(kind, **changes))
    with pytest.raises(EngineError, match=words):
        model.follow_routers()


@pytest.mark.parametrize("again", [False, True])
def test_the_loss_of_routers_is_that_of_transformers(again: bool) -> None:
    plain = build("mixtral", router_aux_loss_coef=0.5)
    model = TransformersModel(build("mixtral"))
    model.follow_routers()
    ids, count = prompt(12), 11
    theirs: Any = plain(input_ids=torch.tensor([ids]), labels=torch.tensor([ids]), output_router_logits=True)
    theirs.loss.backward()
    written = [(ids, list(range(1, 12)), [0.0] * count, None)]
    config = LearnerConfig(device="cpu", router_loss=0.5, lr=0.0, gradient_checkpointing=again)
    metrics = (
        LocalLearner(model, config, temperature=1.0)
        .update([batch_of(written, replay=False)], Objective(loss="nll"))
        .metrics
    )
    assert metrics["actor/router_loss"] == pytest.approx(theirs.aux_loss.item(), rel=1e-5)
    assert metrics["loss"] == pytest.approx(theirs.loss.item(), rel=1e-5)
    norm = torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]).norm()
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_a_number_for_every_expert_and_one_more() -> None:
    assert expert_dtype([RouterShape(255, 8)]) is torch.uint8
    assert expert_dtype([RouterShape(128, 8), RouterShape(256, 8)]) is torch.uint16


def run(model: TransformersModel, body: Callable[[TorchSampler], Awaitable[Any]], **options: Any) -> Any:
    async def inside() -> Any:
        sampler = TorchSampler(model, decode=letters, max_batch=4, threads=1, regime=Regime(1, 1, 32), **options)
        try:
            return await asyncio.wait_for(body(sampler), 60)
        finally:
            await sampler.close()

    return asyncio.run(inside())


async def conversation(sampler: TorchSampler, sibling: int, turns: int = 3) -> tuple[list[int], list[int], Any, Any]:
    """Tokens, places of the policy's, their log-probs, and the experts of all that was computed."""
    ids, places, logprobs = prompt(41), [], []
    noted = np.full((200, 2, 2), 255, dtype=np.uint8)
    for turn in range(turns):
        request = Request(f"c{sibling}", np.array(ids), SamplingParams(12), NoiseKey(0, 0, "c", sibling))
        done = await sampler.generate(request)
        fed = len(ids) + len(done.token_ids) - 1
        assert done.experts is not None and len(done.experts) == (fed if turn == 0 else 12 + 4)
        noted[fed - len(done.experts) : fed] = done.experts
        places += range(len(ids), len(ids) + len(done.token_ids))
        logprobs += done.logprobs.tolist()
        ids = [*ids, *done.token_ids.tolist(), *prompt(4, seed=turn)]
    return ids, places, logprobs, noted[: len(ids)]


def nearly_tied(dtype: torch.dtype = torch.float32) -> TransformersModel:
    """Routers whose scores lie closer together than rounding."""
    model = TransformersModel(build("mixtral")).move(torch.device("cpu"), dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.copy_(parameter[:1] + 3e-8 * torch.randn_like(parameter))
    model.follow_routers()
    return model


def batch_of(written: list[tuple[list[int], list[int], Any, Any]], *, replay: bool) -> TokenBatch:
    lengths = np.array([len(ids) for ids, *_ in written])
    starts, counts = np.cumsum(lengths) - lengths, [len(places) for _, places, *_ in written]
    return TokenBatch(
        tokens=np.concatenate([np.array(ids) for ids, *_ in written]),
        lengths=lengths,
        index=np.concatenate(
            [start + np.array(places) for start, (_, places, *_) in zip(starts, written, strict=True)]
        ),
        trajectory=np.repeat(np.arange(len(written)), counts),
        trajectory_tokens=np.array(counts),
        minibatch_tokens=sum(counts),
        minibatch_trajectories=len(written),
        experts=np.concatenate([noted for *_, noted in written]) if replay else None,
    )


def test_the_gap_of_a_nearly_tied_router_falls_to_rounding() -> None:
    model = nearly_tied()
    written = run(model, lambda sampler: asyncio.gather(*(conversation(sampler, n) for n in range(4))))
    learner = LocalLearner(model, LearnerConfig(device="cpu", lr=0.0), temperature=1.0)
    sampled = np.concatenate([np.array(logprobs) for _, _, logprobs, _ in written])
    own, replayed = (batch_of(written, replay=replay) for replay in (False, True))
    assert np.abs(learner.score(own, Who.POLICY) - sampled).max() > 1e-2
    assert np.abs(learner.score(replayed, Who.POLICY) - sampled).max() < 1e-4
    logprobs = learner.update([replayed], Objective(loss="nll")).outputs[0].logprobs
    assert np.abs(logprobs - sampled).max() < 1e-4
    for part in halves(whole(replayed)):
        assert np.abs(learner.score(part.batch, Who.POLICY) - sampled[part.places]).max() < 1e-4


def test_kept_turns_and_shared_prompts_have_the_experts_of_their_own_passes() -> None:
    model = TransformersModel(build("mixtral"))
    model.follow_routers()

    async def body(sampler: TorchSampler) -> list[tuple[list[int], list[int], Any, Any]]:
        written = await asyncio.gather(*(conversation(sampler, n) for n in range(3)))
        assert sampler.stats.reused_tokens >= 2 * 32, "prompts are shared"
        return written

    for ids, places, _, noted in run(model, body):
        known = places[-1]  # the last token was never fed
        assert np.array_equal(noted[:known], chosen_by(model, ids)[:known])
        assert (noted[known:] == 255).all()


def chosen_by(model: TransformersModel, ids: list[int]) -> Any:
    routing, lengths = Routing(), (len(ids),)
    with torch.no_grad():
        model(ModelInputs(torch.tensor(ids), positions(lengths), routing=routing), packed(lengths))
    return routing.noted(torch.uint8).numpy()


def test_experts_after_an_update_or_sleep_are_those_under_which_it_went_on() -> None:
    model, other = TransformersModel(build("mixtral")), TransformersModel(build("mixtral", seed=7))
    model.follow_routers()
    shapes, ids = model.weight_shapes(), prompt(50)

    async def body(sampler: TorchSampler) -> Completion:
        request = Request("c", np.array(ids), SamplingParams(40), NoiseKey(0, 0, "c", 0))
        first = await sampler.generate(request)
        later = np.array([*ids, *first.token_ids.tolist(), 5, 6])
        turn = asyncio.create_task(sampler.generate(Request("c", later, SamplingParams(30), NoiseKey(0, 0, "c", 0))))
        while sampler.stats.decoded_tokens < 50:
            await asyncio.sleep(0)
        await sampler.publish(FullWeights(shapes, iter(other.weights())), 1)
        await sampler.sleep()
        await sampler.wake()
        done = await turn
        ids[:] = [*later.tolist(), *done.token_ids.tolist()]
        return done

    done = run(model, body)
    assert done.versions[-1].version == 1 and done.experts is not None
    other.follow_routers()
    assert np.array_equal(done.experts, chosen_by(other, ids)[:-1]), "of the whole sequence, under the new weights"


def test_experts_for_another_number_of_tokens_are_refused() -> None:
    model = nearly_tied()
    with pytest.raises(EngineError, match="experts are given for 3 of 20 tokens"):
        states(model, Routing(torch.zeros(3, 2, 2, dtype=torch.uint8)))


@pytest.mark.parametrize("setting", ["learner.routing_replay=true", "learner.router_loss=0.1"])
def test_a_model_of_our_own_decoder_is_refused_before_a_run_is_made(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", setting]) == 2
    name = setting.partition("=")[0]
    assert f"{name}: this model has no routers that choose experts" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()
