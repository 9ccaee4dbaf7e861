"""Attention of a learner over packed sequences: every way gives what `attention.packed` gives, its gradient too."""

import pytest
import torch
from torch import Tensor

from turnwise.engines.model.attention import packed
from turnwise.engines.model.packed_attention import PackedAttend, Way, _cudnn, attended, way_of
from turnwise.engines.model.policy_model import Mixing

CPU = torch.device("cpu")
LENGTHS = (70, 1, 33, 12)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.1, 0.0, 1.5])
MIXINGS = {
    "plain": Mixing(),
    "scaled": Mixing(scale=0.3),
    "window": Mixing(window=9),
    "wide window": Mixing(window=500),
    "softcap": Mixing(softcap=1.5),
    "sinks": Mixing(sinks=SINKS),
    "all": Mixing(0.4, 20, 2.0, SINKS),
}


def parts(
    device: str = "cpu", dtype: torch.dtype = torch.float32, size: int = 8, value_size: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(2)
    shapes = ((6, size), (2, size), (2, value_size))
    made = [torch.randn(sum(LENGTHS), *shape, generator=noise).to(device, dtype).requires_grad_() for shape in shapes]
    return made[0], made[1], made[2]


def backward(attend: object, given: tuple[Tensor, ...], mixing: Mixing) -> tuple[Tensor, ...]:
    """The output, and the gradients of queries, keys, values and sinks."""
    sinks = mixing.sinks.to(given[0]).requires_grad_() if mixing.sinks is not None else None
    used = Mixing(mixing.scale, mixing.window, mixing.softcap, sinks)
    out = attend(0, *given, used)  # type: ignore[operator]
    weights = torch.linspace(-1.0, 1.0, out.numel()).view_as(out).to(out)
    wanted = given if sinks is None else (*given, sinks)
    return (out, *torch.autograd.grad(out, wanted, weights))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("name", MIXINGS)
@pytest.mark.parametrize("value_size", [8, 6])
def test_output_and_gradients_are_those_of_rectangles(name: str, invariant: bool, value_size: int) -> None:
    given = parts(value_size=value_size)
    expected = backward(packed(LENGTHS), given, MIXINGS[name])
    found = backward(PackedAttend(LENGTHS, CPU, invariant=invariant), given, MIXINGS[name])
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if invariant:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(one, other)


def test_without_gradient_and_for_frozen_keys() -> None:
    q, k, v = parts()
    attend = PackedAttend(LENGTHS, CPU, invariant=True)
    with torch.no_grad():
        bare = attend(0, q, k, v, Mixing())
    out = attend(0, q, k.detach(), v.detach(), Mixing())
    out.sum().backward()
    assert torch.equal(out, bare) and q.grad is not None and k.grad is None


def test_invariant_attention_does_not_depend_on_the_other_sequences() -> None:
    q, k, v = (x.detach() for x in parts())
    together = PackedAttend(LENGTHS, CPU, invariant=True)(0, q, k, v, Mixing())
    alone = PackedAttend([33], CPU, invariant=True)(0, q[71:104], k[71:104], v[71:104], Mixing())
    torch.testing.assert_close(alone, together[71:104], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("lengths", "dtype", "sizes", "mixing", "expected"),
    [
        ((5, 9), torch.bfloat16, (64, 64), Mixing(), Way.FLASH),
        ((9, 9), torch.bfloat16, (64, 64), Mixing(), Way.RECTANGLES),
        ((9, 9), torch.float16, (64, 64), Mixing(window=4), Way.FLASH),
        ((9, 9), torch.float16, (64, 64), Mixing(window=9), Way.RECTANGLES),
        ((5, 9), torch.float32, (64, 64), Mixing(), Way.RECTANGLES),
        ((5, 9), torch.bfloat16, (64, 32), Mixing(), Way.RECTANGLES),
        ((5, 9), torch.bfloat16, (60, 60), Mixing(), Way.RECTANGLES),
        ((5, 9), torch.bfloat16, (264, 264), Mixing(), Way.RECTANGLES),
        ((5, 9), torch.bfloat16, (80, 80), Mixing(softcap=2.0), Way.RECTANGLES),
        ((5, 9), torch.bfloat16, (80, 80), Mixing(sinks=SINKS), Way.RECTANGLES),
    ],
)
def test_the_way_is_chosen_by_lengths_and_by_what_the_layer_asks_for(
    lengths: tuple[int, ...], dtype: torch.dtype, sizes: tuple[int, int], mixing: Mixing, expected: Way
) -> None:
    assert way_of(lengths, torch.device("cuda"), dtype, sizes, mixing) is expected
    assert way_of(lengths, CPU, dtype, sizes, mixing) is Way.RECTANGLES


def test_flash_attention_is_called_as_torch_declares_it() -> None:
    q, k, v = (x.detach().to("meta").requires_grad_() for x in parts(dtype=torch.bfloat16))
    attend = PackedAttend(LENGTHS, torch.device("meta"), invariant=False)
    for mixing in (Mixing(), Mixing(scale=0.5, window=4)):
        out = attend.fast(q, k, v, mixing, Way.FLASH)
        assert (
            out.shape == (sum(LENGTHS), 48)
            and out.requires_grad
            and "FlashAttention" in str(out.grad_fn.next_functions)
        )


@pytest.mark.parametrize("lengths", [LENGTHS, (29, 29, 29, 29)], ids=["uneven", "even"])
@pytest.mark.parametrize("invariant", [False, True])
def test_without_autograd_the_gradient_is_the_same(lengths: tuple[int, ...], invariant: bool) -> None:
    given = parts()
    expected = backward(packed(lengths), given, Mixing())
    with torch.no_grad():
        attend = PackedAttend(lengths, CPU, invariant=invariant)
        for own in (attend, lambda *given: attend(*given)):
            out, kept = attended(own, 0, *(x.detach() for x in given))
            pull = torch.linspace(-1.0, 1.0, out.numel()).view_as(out)
            found = (out, *kept.gradient(pull))
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_backward_is_called_as_torch_declares_it() -> None:
    """No more can be asked without a GPU; test_fused_cuda.py asks the rest."""
    q, k, v = (x.detach().to("meta") for x in parts(dtype=torch.bfloat16))
    attend = PackedAttend(LENGTHS, torch.device("meta"), invariant=False)
    with torch.no_grad():
        attend._way = Way.FLASH
        out, kept = attended(attend, 0, q, k, v)
        assert out.shape == (116, 48) and [x.shape for x in kept.gradient(out)] == [q.shape, k.shape, v.shape]
        even = [x.view(4, 29, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)]
        mixed, by_cudnn = _cudnn(*even)
        assert [x.shape for x in by_cudnn.gradient(mixed)] == [x.shape for x in even]
