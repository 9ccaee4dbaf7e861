"""The layers of a fused decoder as one step: gradients of the plain decoder, and activations that go when they may."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from turnwise.engines.model.attention import packed, positions
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.fused_decoder import FusedDecoder
from turnwise.engines.model.huggingface_folder import DecoderConfig, RopeConfig
from turnwise.engines.model.packed_attention import PackedAttend
from turnwise.engines.model.policy_model import Attend, ModelInputs, PolicyModel

CPU = torch.device("cpu")
LLAMA = DecoderConfig("llama", 40, 24, 32, 3, 4, 2, 8, 64, rope=RopeConfig(500.0))
CONFIGS = {
    "llama": LLAMA,
    "llama-biased": replace(LLAMA, qkv_bias=True, output_bias=True),
    "qwen2": replace(LLAMA, model_type="qwen2", qkv_bias=True, num_kv_heads=4, tied=True),
    "qwen3": replace(LLAMA, model_type="qwen3", head_dim=10, num_kv_heads=1),
}
UNEVEN, EVEN = (7, 1, 4), (4, 4, 4)
ROWS = torch.tensor([2, 6, 7, 9, 11])
TOKENS = torch.randint(40, (12,), generator=torch.Generator().manual_seed(3))


def decoder_of(config: DecoderConfig) -> Decoder:
    """In float64, with weights that all matter."""
    model = Decoder.fresh(config, 1, torch.float64)
    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            shift = torch.empty(parameter.shape).normal_(0.0, 0.2, generator=noise)
            parameter.copy_(parameter * 8.0 if parameter.dim() == 2 else parameter + shift)
    return model


def fused_of(model: Decoder, invariant: bool = False) -> FusedDecoder:
    weights = {name: tensor.clone() for name, tensor in model.tensors().items()}
    return FusedDecoder.of(Decoder(model.config, weights), device=CPU, dtype=torch.float64, invariant=invariant)


def hidden_of(
    model: PolicyModel, attend: Attend, lengths: tuple[int, ...], rows: Tensor | None, recompute: int = 0
) -> Tensor:
    found: Tensor = model(ModelInputs(TOKENS, positions(lengths)), attend, rows=rows, recompute=recompute)
    return found


def gradients(model: PolicyModel, hidden: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad()
    (hidden * torch.linspace(-1.0, 1.0, hidden.numel(), dtype=hidden.dtype).view_as(hidden)).sum().backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def agree(found: dict[str, Tensor | None], expected: dict[str, Tensor | None], near: float = 1e-8) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        one = found[name]
        assert (one is None) == (gradient is None), name
        if one is not None and gradient is not None:
            torch.testing.assert_close(one, gradient, rtol=near, atol=near * float(gradient.abs().max()), msg=name)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("rows", [None, ROWS], ids=["all", "rows"])
@pytest.mark.parametrize("lengths", [UNEVEN, EVEN], ids=["uneven", "even"])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_the_plain_decoder(
    name: str, lengths: tuple[int, ...], rows: Tensor | None, invariant: bool
) -> None:
    plain = decoder_of(CONFIGS[name])
    expected = hidden_of(plain, packed(lengths), lengths, rows)
    wanted = gradients(plain, expected)
    fused = fused_of(plain, invariant)
    for recompute in (0, 2, 99):
        found = hidden_of(fused, PackedAttend(lengths, CPU, invariant=invariant), lengths, rows, recompute)
        assert "_Stack" in str(found.grad_fn)
        near = 1e-5 if invariant else 1e-8  # the sampler's attention adds in float32
        torch.testing.assert_close(found, expected, rtol=near, atol=near)
        agree(gradients(fused, found), wanted, near)


@pytest.mark.parametrize("recompute", [0, 2])
@pytest.mark.parametrize(
    "frozen",
    [("attention_norm", "qkv_bias", "down"), ("output", "mlp_norm", "gate_up", "norm", "k_norm"), ("layers.0", "layers.1", "embed")],
    ids=["some", "others", "below"],
)  # fmt: skip
@pytest.mark.parametrize("name", CONFIGS)
def test_frozen_weights_get_no_gradient_and_the_rest_the_same(
    name: str, frozen: tuple[str, ...], recompute: int
) -> None:
    fused = fused_of(decoder_of(CONFIGS[name]))
    attend = PackedAttend(UNEVEN, CPU, invariant=False)
    expected = gradients(fused, hidden_of(fused, attend, UNEVEN, ROWS, recompute))
    for key, parameter in fused.named_parameters():
        still = key.endswith(frozen) if frozen[0][-1] != "0" else key.startswith(frozen)
        parameter.requires_grad_(not still)
        expected[key] = None if still else expected[key]
    assert any(gradient is not None for gradient in expected.values())
    found = gradients(fused, hidden_of(fused, attend, UNEVEN, ROWS, recompute))
    assert all((one is None and found[key] is None) or torch.equal(one, found[key]) for key, one in expected.items())


def test_layers_below_every_trained_weight_are_not_kept() -> None:
    fused, watched = fused_of(decoder_of(LLAMA)), Watched()
    fused.requires_grad_(False)
    fused.layers[2].requires_grad_(True)
    hidden = hidden_of(fused, watched, UNEVEN, ROWS)
    assert watched.alive() == [2]
    fused.requires_grad_(False)
    assert not hidden_of(fused, watched, UNEVEN, ROWS).requires_grad and watched.alive() == [2]
    del hidden
    assert watched.alive() == []


class Watched:
    """Attention that knows which layers' queries are still there, and may run out of memory in a layer's backward."""

    def __init__(self, fails: int | None = None, forward: int | None = None) -> None:
        self._attend, self._fails, self._forward = packed(UNEVEN), fails, forward
        self._queries: list[tuple[int, weakref.ref[Tensor]]] = []
        self.seen: list[tuple[int, list[int]]] = []
        """Of each layer when its gradient was asked for, those that were there."""

    def alive(self) -> list[int]:
        return [layer for layer, query in self._queries if query() is not None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mixing: object) -> Tensor:
        if layer == self._forward:
            raise torch.OutOfMemoryError("no room")
        if q.requires_grad:
            self._queries.append((layer, weakref.ref(q)))
            q.register_hook(lambda gradient: self.back(layer))
        return self._attend(layer, q, k, v, mixing)  # type: ignore[arg-type]

    def back(self, layer: int) -> None:
        self.seen.append((layer, self.alive()))
        if layer == self._fails:
            raise torch.OutOfMemoryError("no room")


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What goes must go by itself: on a GPU nobody waits for the collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_backward_lets_go_of_each_layer_before_the_next() -> None:
    fused, watched = fused_of(decoder_of(LLAMA)), Watched()
    gradients(fused, hidden_of(fused, watched, UNEVEN, ROWS, recompute=1))
    assert watched.seen == [(2, [1, 2]), (1, [1]), (0, [0])] and watched.alive() == []
    hidden_of(fused, watched, UNEVEN, ROWS)
    assert watched.alive() == [], "a pass that nobody differentiates is gone with its result"


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("recompute", [0, 2])
def test_a_pass_that_does_not_fit_leaves_nothing_behind(recompute: int) -> None:
    fused = fused_of(decoder_of(LLAMA))
    for watched in (Watched(fails=1), Watched(forward=1)):
        failed = False
        try:
            gradients(fused, hidden_of(fused, watched, UNEVEN, ROWS, recompute))
        except torch.OutOfMemoryError:
            failed = True
        assert failed and watched.alive() == []
        assert all(parameter.grad is None for parameter in fused.parameters())


def test_backward_runs_once() -> None:
    fused = fused_of(decoder_of(LLAMA))
    total = hidden_of(fused, packed(UNEVEN), UNEVEN, ROWS).sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        total.backward()


@pytest.mark.parametrize("recompute", [0, 2])
def test_a_layer_with_a_hook_is_called_as_a_module(recompute: int) -> None:
    plain = decoder_of(CONFIGS["qwen3"])
    expected = gradients(plain, hidden_of(plain, packed(UNEVEN), UNEVEN, ROWS))
    fused, called = fused_of(plain), []
    handle = fused.layers[1].register_forward_pre_hook(lambda layer, given: called.append(layer.index))
    found = hidden_of(fused, PackedAttend(UNEVEN, CPU, invariant=False), UNEVEN, ROWS, recompute)
    assert called == [1] and "_Stack" not in str(found.grad_fn)
    agree(gradients(fused, found), expected)
    handle.remove()
    assert "_Stack" in str(hidden_of(fused, packed(UNEVEN), UNEVEN, ROWS).grad_fn)
