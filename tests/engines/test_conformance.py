"""One suite over both implementations of a policy model and many architectures, held against plain transformers."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import CONTEXT, HYBRID, SUPPORTED, VOCABULARY, WINDOW, build
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from turnwise.engines.model.attention import Chunk, Regime, packed, positions
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.lora import LoraDecoder
from turnwise.engines.model.peft_adapter import PeftModel
from turnwise.engines.model.policy_model import ModelInputs, PolicyModel
from turnwise.engines.model.recurrence import Recurrence
from turnwise.engines.model.transformers.model import TransformersModel
from turnwise.engines.samplers.cpu.steps import decode, prefill
from turnwise.engines.samplers.kv_cache import ActiveRows
from turnwise.errors import EngineError

NATIVE = ("llama", "qwen2", "qwen3")
CASES = [(kind, "transformers") for kind in (*SUPPORTED, *HYBRID)] + [(kind, "native") for kind in NATIVE]
LENGTHS = (37, 9, 24)
TEMPERATURE = 0.7
TOKENS = torch.from_numpy(np.random.default_rng(3).integers(3, VOCABULARY, size=sum(LENGTHS)))
PARTS = TOKENS.split(LENGTHS)
SCORED = torch.cat([torch.arange(5, length) + start for length, start in zip(LENGTHS, (0, 37, 46), strict=True)])
"""The places of tokens that are trained on."""


@dataclass(frozen=True, slots=True)
class Case:
    """An architecture in one implementation, and plain transformers with the same weights."""

    kind: str
    plain: PreTrainedModel
    folder: Path
    read: Callable[[], PolicyModel]

    def adapted(self, rank: int = 3, alpha: float = 6.0, seed: int = 5) -> LoraDecoder | PeftModel:
        """The model with LoRA, its weights its own."""
        model = self.read()
        if isinstance(model, Decoder):
            return LoraDecoder(model, rank=rank, alpha=alpha, seed=seed)
        assert isinstance(model, TransformersModel)
        made = model.with_lora(rank=rank, alpha=alpha, seed=seed)
        assert isinstance(made, PeftModel)
        return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def of(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        build(kind).save_pretrained(folder)
        return folder

    return of


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def case(request: pytest.FixtureRequest, folders: Callable[[str], Path]) -> Case:
    kind, implementation = request.param
    folder = folders(kind)
    read: Callable[[], PolicyModel] = lambda: TransformersModel.read(folder)  # noqa: E731
    if implementation == "native":
        read = lambda: Decoder.read(folder)  # noqa: E731
    return Case(kind, build(kind), folder, read)


@pytest.fixture(scope="module")
def model(case: Case) -> PolicyModel:
    """For tests that change nothing."""
    return case.read()


def inputs(lengths: tuple[int, ...] = LENGTHS, tokens: Tensor = TOKENS) -> ModelInputs:
    return ModelInputs(tokens, positions(lengths), recurrence=Recurrence(lengths))


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> bool:
    """Alike, as a share of the largest number expected."""
    scale = max(1.0, expected.detach().abs().max().item())
    return found.shape == expected.shape and bool(((found - expected).abs() <= tolerance * scale).all())


def logits_of(model: PolicyModel) -> Tensor:
    with torch.no_grad():
        return model.logits(model(inputs(), packed(LENGTHS)))


def plain_logits(plain: PreTrainedModel) -> Tensor:
    """Each sequence by itself, through all that the family's own code does."""
    return torch.cat([plain(input_ids=part[None], use_cache=False).logits[0].float() for part in PARTS])


def _eager(folder: Path) -> PreTrainedModel:
    """With the attention that knows soft caps and sinks in every release."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def naive_scores(logits: Tensor) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(logits[SCORED - 1] / TEMPERATURE, dim=-1)
    return logp.gather(1, TOKENS[SCORED, None])[:, 0], -(logp.exp() * logp).sum(-1)


def policy_loss(logprobs: Tensor, entropies: Tensor) -> Tensor:
    """A clipped policy gradient with advantages of both signs and an entropy bonus."""
    advantages = torch.linspace(-1.0, 1.0, len(logprobs))
    ratio = torch.exp(logprobs - logprobs.detach() + 0.1 * torch.cos(torch.arange(len(logprobs))))
    return -(torch.minimum(ratio * advantages, ratio.clamp(0.95, 1.05) * advantages).mean() + 0.1 * entropies.mean())


def step(model: PolicyModel, *, recompute: bool = False, rate: float = 1.0) -> None:
    """One step of plain gradient descent."""
    hidden = model(inputs(), packed(LENGTHS), rows=SCORED - 1, recompute=recompute)
    policy_loss(*model.scores(hidden, TOKENS[SCORED], temperature=TEMPERATURE, chunk=13)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=rate)
                parameter.grad = None


def copied(model: PolicyModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.weights()}


def gradients(plain: PreTrainedModel) -> dict[str, Tensor]:
    """Of plain transformers by the names of the checkpoint, zero where nothing flows."""
    plain.zero_grad()
    policy_loss(*naive_scores(plain_logits(plain))).backward()
    found = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in plain.named_parameters()
    }
    return revert_weight_conversion(plain, found)


def test_logits_equal_plain_transformers_and_packed_equals_single(case: Case, model: PolicyModel) -> None:
    together = logits_of(model)
    with torch.no_grad():
        assert close(together, plain_logits(case.plain))
        for part, expected in zip(PARTS, together.split(LENGTHS), strict=True):
            alone = model(inputs((len(part),), part), packed([len(part)]))
            assert close(model.logits(alone), expected, 1e-5)
    assert together.dtype is torch.float32 and together.std() > 0.3, (
        "distributions without contrast would hide mistakes"
    )
    assert model.shape.vocab_size == VOCABULARY and model.shape.context_length == CONTEXT


def test_prompts_in_pieces_and_tokens_in_batches_equal_the_whole(case: Case, model: PolicyModel) -> None:
    whole = logits_of(model).split(LENGTHS)
    tokens = [part.numpy() for part in PARTS]
    rows, regime = ActiveRows.of(model, 3), Regime(4, 2, 32)
    rows.reserve(3, max(LENGTHS) + 3)
    with torch.inference_mode():
        for pieces in ([Chunk(0, 0, 20), Chunk(1, 0, 5), Chunk(2, 0, 11)], [Chunk(0, 20, 34), Chunk(2, 11, 21)]):
            fed = [tokens[piece.row][piece.start : piece.end] for piece in pieces]
            expected = torch.stack([whole[piece.row][piece.end - 1] for piece in pieces])
            assert close(prefill(model, rows, pieces, fed, regime), expected)
        for places in (np.array([34, 5, 21]), np.array([35, 6, 22]), np.array([36, 7, 23])):
            found = decode(model, rows, np.array([t[p] for t, p in zip(tokens, places, strict=True)]), places, regime)
            assert close(found, torch.stack([part[at] for part, at in zip(whole, places, strict=True)]))


def test_scores_and_a_step_equal_plain_autograd_with_and_without_recomputing(case: Case) -> None:
    expected, reference = naive_scores(plain_logits(case.plain)), gradients(case.plain)
    for recompute in (False, True):
        trained = case.read()
        before = copied(trained)
        hidden = trained(inputs(), packed(LENGTHS), rows=SCORED - 1, recompute=recompute)
        found = trained.scores(hidden, TOKENS[SCORED], temperature=TEMPERATURE, chunk=13)
        assert close(found[0], expected[0].detach()) and close(found[1], expected[1].detach())
        step(trained, recompute=recompute)
        after = copied(trained)
        assert set(reference) <= set(before), "every parameter has a name in the checkpoint"
        for name, tensor in before.items():
            moved = tensor - after[name]
            wanted = reference.get(name, torch.zeros_like(tensor))
            assert close(moved, wanted), f"{name} moves as in plain transformers, and what is no parameter does not"
            assert bool(moved.any()) == bool(wanted.any()), name


def test_factors_alone_learn(case: Case, tmp_path: Path) -> None:
    model = case.adapted()
    frozen = {name: parameter.clone() for name, parameter in model.named_parameters() if not parameter.requires_grad}
    factors = {name: parameter.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
    merged = copied(model)
    assert close(logits_of(model), plain_logits(case.plain)), "an adapter that has not learned changes nothing"
    assert merged.keys() == model.weight_shapes().keys() and all(f.dtype is torch.float32 for f in factors.values())
    assert not any("embed" in name or "head" in name for name in factors)
    step(model, rate=0.3)
    step(model, recompute=True, rate=0.3)
    own = dict(model.named_parameters())
    assert all(torch.equal(own[name], value) for name, value in frozen.items())
    assert all(not torch.equal(own[name], value) for name, value in factors.items())
    learned, now = logits_of(model), copied(model)
    assert not close(learned, plain_logits(case.plain), 1e-2)
    changed = {name for name, tensor in now.items() if not torch.equal(tensor, merged[name])}
    projections = {name for name in merged if "attn" in name and merged[name].dim() == 2 and "norm" not in name}
    assert projections <= changed and any("attn" not in name for name in changed), (
        "attention all, and what comes behind it"
    )
    assert all(merged[name].dim() > 1 for name in changed) and not any("norm" in name for name in changed)
    with model.without_adapter():
        assert close(logits_of(model), plain_logits(case.plain))
    assert close(logits_of(model), learned, 0.0) and all(p.requires_grad for n, p in own.items() if n in factors)
    model.save(tmp_path / "merged")
    # Two large steps make sharp models: what rounding changes in one sum is larger behind the next.
    assert close(plain_logits(_eager(tmp_path / "merged")), learned, 1e-2)
    assert torch.equal(logits_of(model), learned), "saving changes nothing"
    again = {n: p for n, p in case.adapted().named_parameters() if p.requires_grad}
    assert all(torch.equal(again[name], value) for name, value in factors.items()), "the seed decides"


def test_an_adapter_is_read_by_peft(case: Case, tmp_path: Path) -> None:
    from peft import PeftModel as TheirModel

    model = case.adapted()
    step(model, rate=0.3)
    model.save_adapter(tmp_path, str(case.folder))
    theirs = TheirModel.from_pretrained(build(case.kind), tmp_path)
    assert close(plain_logits(theirs), logits_of(model))


def test_what_is_saved_is_what_transformers_loads(case: Case, model: PolicyModel, tmp_path: Path) -> None:
    expected = logits_of(model)
    model.save(tmp_path)
    written = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    streamed = dict(model.weights())
    assert written.keys() == streamed.keys() == load_file(case.folder / "model.safetensors").keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in streamed.items())
    assert model.weight_shapes() == {name: tuple(tensor.shape) for name, tensor in written.items()}
    loaded, problems = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert "turnwise" not in (tmp_path / "config.json").read_text(), "our attention is no property of the weights"
    assert not problems["missing_keys"] and not problems["unexpected_keys"] and not problems["mismatched_keys"]
    assert close(plain_logits(loaded), expected) and type(loaded) is type(case.plain)


def test_weights_stream_into_another_model(case: Case, model: PolicyModel) -> None:
    other = case.read()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.5)
    assert not close(logits_of(other), logits_of(model), 1e-2)
    places = [parameter.data_ptr() for parameter in other.parameters()]
    other.load(reversed(list(model.weights())))
    assert torch.equal(logits_of(other), logits_of(model))
    assert places == [parameter.data_ptr() for parameter in other.parameters()], "copied in place"
    streamed = list(model.weights())
    name = streamed[-1][0]
    with pytest.raises(EngineError, match=f"{name} are missing"):
        other.load(streamed[:-1])
    with pytest.raises(EngineError, match="stranger.weight is no weight here"):
        other.load([("stranger.weight", torch.zeros(1))])
    with pytest.raises(EngineError, match=f"{name} is not"):
        other.load([(name, torch.zeros(1, 2, 3, 4))])


def test_layers_are_modules_whose_hooks_fire(case: Case, model: PolicyModel) -> None:
    layers = list(model.layers) if isinstance(model, Decoder) else model.layer_modules()  # type: ignore[attr-defined]
    assert len(layers) == case.plain.config.num_hidden_layers
    fired: list[int] = []
    hooks = [
        layer.register_forward_hook(lambda module, given, made, n=n: fired.append(n)) for n, layer in enumerate(layers)
    ]
    try:
        logits_of(model)
    finally:
        for hook in hooks:
            hook.remove()
    assert fired == list(range(len(layers)))
    owned = {id(parameter) for layer in layers for parameter in layer.parameters()}
    beside = [name for name, parameter in model.named_parameters() if id(parameter) not in owned]
    assert 0 < len(beside) <= 6, "all but embeddings, the last norm and the head lies in a layer"


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "gpt_oss", "gemma2", "gemma4_text"])
def test_the_sequences_are_long_enough_for_windows_to_matter(kind: str) -> None:
    with torch.no_grad():
        narrow, wide = (plain_logits(build(kind, sliding_window=window)) for window in (WINDOW, CONTEXT))
    assert not close(narrow, wide, 1e-2)


def test_sinks_soft_caps_and_scales_matter() -> None:
    plain = build("gpt_oss")
    with torch.no_grad():
        before = plain_logits(plain)
        for name, parameter in plain.named_parameters():
            if "sinks" in name:
                parameter.sub_(20.0)
        assert not close(plain_logits(plain), before, 1e-2)
        capped, free = (plain_logits(build("gemma2", attn_logit_softcapping=cap)) for cap in (2.0, None))
        assert not close(capped, free, 1e-2)
        sharp, flat = (plain_logits(build("granite", attention_multiplier=scale)) for scale in (0.2, 0.1))
        assert not close(sharp, flat, 1e-2)


@pytest.mark.parametrize("kind", HYBRID)
def test_no_state_of_a_packed_sequence_reaches_another(kind: str) -> None:
    """Not a bit of what is computed, and no gradient, whatever its neighbours are and however long."""
    model = TransformersModel(build(kind))
    assert model.shape.states and model.shape.no_packing is None and model.shape.no_caching is None
    for lengths in ((9, 9, 9), (9, 5, 9)):
        starts = np.cumsum((0, *lengths))
        tokens = TOKENS[: sum(lengths)]
        others = tokens.clone()
        others[: lengths[0]], others[starts[2] :] = tokens[: lengths[0]].flip(0), tokens[starts[2] :].roll(1)
        middle = slice(starts[1], starts[2])
        entered: list[Tensor] = []
        embeddings = model.model.get_input_embeddings()
        watch = embeddings.register_forward_hook(lambda m, ids, made, kept=entered: kept.append(made))
        states = [model(inputs(lengths, each), packed(lengths))[middle] for each in (tokens, others)]
        watch.remove()
        assert torch.equal(*states)
        (gradient,) = torch.autograd.grad(states[0].sin().sum(), entered[0])
        outside = torch.ones(sum(lengths), dtype=torch.bool)
        outside[middle] = False
        assert bool((gradient[0, outside] == 0).all()) and bool(gradient[0, middle].any())


def test_tokens_that_are_not_said_to_be_sequences_are_refused() -> None:
    model = TransformersModel(build("lfm2"))
    with pytest.raises(EngineError, match="Lfm2ForCausalLM must be told which tokens are one sequence"):
        model(ModelInputs(TOKENS, positions(LENGTHS)), packed(LENGTHS))


def test_layers_that_do_not_go_on_from_a_state_by_several_tokens_are_given_one_by_one() -> None:
    model = TransformersModel(build("mamba", state_size=8))
    assert all(layer.one_by_one for layer in model.findings.recurrent.values())
    assert model.shape.no_caching is None and model.shape.no_packing is None
    rows, whole = ActiveRows.of(model, 1), logits_of(model)[:37]
    rows.reserve(1, 40)
    with torch.inference_mode():
        for start, end in ((0, 20), (20, 37)):
            tokens = PARTS[0][start:end].numpy()
            assert close(prefill(model, rows, [Chunk(0, start, end)], [tokens], Regime(4, 2, 32))[0], whole[end - 1])


def test_steps_of_time_have_the_same_bounds_for_a_single_token() -> None:
    """transformers leaves them out there: such a sampler would drift away from the learner."""
    plain = build("nemotron_h")
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.endswith("dt_bias"):
                parameter.sub_(9.0)
    model = TransformersModel(plain)
    rows, whole = ActiveRows.of(model, 1), logits_of(model)[:37]
    rows.reserve(1, 40)
    with torch.inference_mode():
        prefill(model, rows, [Chunk(0, 0, 20)], [PARTS[0][:20].numpy()], Regime(4, 2, 32))
        for at in range(20, 37):
            found = decode(model, rows, PARTS[0][at : at + 1].numpy(), np.array([at]), Regime(4, 2, 32))
            assert close(found[0], whole[at], 1e-5)


REFUSED = {
    "bloom": ({"n_head": 4, "n_layer": 2}, "BloomForCausalLM attends by code of its own"),
    "llama4_text": (
        {"head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 8, "intermediate_size_mlp": 48},
        "llama4_text hides tokens by another rule than a causal mask or a sliding window",
    ),
    "doge": ({}, "DogeAttention attends with a mask of its own making"),
    "bert": ({"is_decoder": True, "is_causal": False}, "bert hides tokens by another rule"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_attends_in_a_way_of_its_own_is_refused_by_name(kind: str) -> None:
    changes, reason = REFUSED[kind]
    with pytest.raises(EngineError) as refusal:
        TransformersModel(build(kind, **changes))
    assert reason in str(refusal.value)


def test_logits_that_the_model_makes_otherwise_are_refused() -> None:
    plain = build("qwen3")
    plain.lm_head.register_forward_hook(lambda module, given, made: made * 2 + given[0].sum())
    with pytest.raises(
        EngineError, match="Qwen3ForCausalLM gives other logits with Turnwise's attention than with its own"
    ):
        TransformersModel(plain)


def test_angles_that_change_with_the_length_bound_the_context() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 48, **factors}
    plain = build("phi3", rope_parameters=rope, original_max_position_embeddings=48)
    assert TransformersModel(plain).shape.context_length == 48


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "deepseek_v3"])
def test_bfloat16(kind: str, folders: Callable[[str], Path]) -> None:
    model = TransformersModel.read(folders(kind), torch.bfloat16)
    expected = plain_logits(build(kind))
    assert model.dtype is torch.bfloat16 and all(p.dtype is torch.bfloat16 for p in model.parameters())
    apart = (logits_of(model) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert apart.median() < 0.1
    rows = ActiveRows(model.shape.caches, torch.bfloat16, 1)
    rows.reserve(1, 40)
    with torch.inference_mode():
        tokens = PARTS[0].numpy()
        found = prefill(model, rows, [Chunk(0, 0, 36)], [tokens[:36]], Regime(4, 2, 32))
        last = decode(model, rows, tokens[36:], np.array([36]), Regime(4, 2, 32))
    pairs = ((found, logits_of(model)[35:36]), (last, logits_of(model)[36:37]))
    assert all(float((x - y).norm() / y.norm()) < 0.2 for x, y in pairs)
    dtypes = {name: tensor.dtype for name, tensor in model.weights()}
    adapted = model.with_lora(rank=2, alpha=4.0, seed=0)
    step(adapted)
    assert all(p.dtype is torch.float32 for p in adapted.parameters() if p.requires_grad)
    assert {n: t.dtype for n, t in adapted.weights()} == dtypes, "merged in the format of what is below"


def test_a_folder_that_lacks_a_weight_is_refused_and_not_filled_up(tmp_path: Path) -> None:
    build("qwen3").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if "layers.1.mlp.up_proj" not in name}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(EngineError, match="lacks the tensors model.layers.1.mlp.up_proj.weight"):
        TransformersModel.read(tmp_path)
    kept["model.norm.weight"] = torch.ones(7)
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(EngineError, match="its weights have other shapes than config.json says"):
        TransformersModel.read(tmp_path)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(EngineError, match="transformers cannot load"):
        TransformersModel.read(tmp_path)


def test_lora_without_peft_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TransformersModel(build("qwen3"))
    monkeypatch.delitem(sys.modules, "turnwise.engines.model.peft_adapter")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(EngineError, match=r"turnwise\[lora\]"):
        model.with_lora(rank=2, alpha=4.0, seed=0)


def test_dropout_is_off_even_in_training() -> None:
    model = TransformersModel(build("gpt2"))  # drops a tenth nearly everywhere by its config
    model.train()
    assert torch.equal(logits_of(model), logits_of(model)) and model.training
    first, second = (model(inputs(), packed(LENGTHS), recompute=True) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_computes_the_same(case: Case) -> None:
    device = torch.device("cuda")
    expected, reference = plain_logits(case.plain), gradients(case.plain)
    model = case.read().to(device)
    given = ModelInputs(TOKENS.to(device), positions(LENGTHS).to(device))
    with torch.no_grad():
        found = model.logits(model(given, packed(LENGTHS, device)))
    assert close(found.cpu(), expected, 1e-3)
    rows, regime = ActiveRows(model.shape.caches, torch.float32, 2, device), Regime(4, 2, 32)
    rows.reserve(2, 40)
    with torch.inference_mode():
        first, last = PARTS[0].numpy(), PARTS[2].numpy()
        fed = prefill(model, rows, [Chunk(0, 0, 30), Chunk(1, 0, 20)], [first[:30], last[:20]], regime)
        assert close(fed.cpu(), expected[[29, 46 + 19]], 1e-3)
        places = np.array([30, 20])
        decoded = decode(model, rows, np.array([first[30], last[20]]), places, regime)
        assert close(decoded.cpu(), expected[[30, 46 + 20]], 1e-3)
    before = copied(model)
    hidden = model(given, packed(LENGTHS, device), rows=(SCORED - 1).to(device))
    scores = model.scores(hidden, TOKENS[SCORED].to(device), temperature=TEMPERATURE, chunk=13)
    policy_loss(*(score.cpu() for score in scores)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)
    for name, tensor in model.weights():
        assert close((before[name] - tensor).cpu(), reference.get(name, torch.zeros(tensor.shape)), 1e-3), name


def test_facts_are_of_the_model_and_not_of_its_folder(case: Case, tmp_path: Path) -> None:
    model = case.read()
    model.save(tmp_path)
    again = type(model).read(tmp_path)  # type: ignore[attr-defined]
    assert json.loads(json.dumps(again.facts)) == json.loads(json.dumps(model.facts)) and not model.has_adapter
    adapted = case.adapted(rank=2)
    assert adapted.has_adapter and adapted.facts["lora"]["rank"] == 2 and model.facts["lora"] is None
