"""A fused decoder by Triton's kernels in its interpreter: the plain decoder's numbers, the same bits in any company."""

import pytest
import torch
from paged import Pages

from turnwise.engines.kernels.dispatch import interpreted
from turnwise.engines.model.attention import packed, positions
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.fused_decoder import FusedDecoder
from turnwise.engines.model.huggingface_folder import DecoderConfig
from turnwise.engines.model.packed_attention import PackedAttend
from turnwise.engines.model.policy_model import ModelInputs

CPU = torch.device("cpu")
CONFIG = DecoderConfig("qwen3", 40, 24, 32, 1, 4, 2, 12, 64)
LENGTHS = (5, 2)
TOKENS = torch.randint(40, (7,), generator=torch.Generator().manual_seed(3))
INPUTS = ModelInputs(TOKENS, positions(LENGTHS))


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_fused_cuda.py asks the GPU itself")
def test_states_gradients_and_bits_of_a_whole_model() -> None:
    pytest.importorskip("triton")
    plain = Decoder.fresh(CONFIG, 1)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(6.0 if parameter.dim() == 2 else 1.2)
    weights = {name: tensor.clone() for name, tensor in plain.tensors().items()}
    fused = FusedDecoder.of(Decoder(CONFIG, weights), device=CPU, dtype=torch.float32, invariant=True)
    pull = torch.linspace(-1.0, 1.0, 7 * 24).view(7, 24)
    expected = plain(INPUTS, packed(LENGTHS))
    (expected * pull).sum().backward()
    with interpreted():
        states = fused(INPUTS, PackedAttend(LENGTHS, CPU, invariant=True))
        (states * pull).sum().backward()
        pages = Pages(fused, 2, 5, 1)
        tokens = TOKENS.split(LENGTHS)
        fed = [pages.states(fused, tokens, chunks) for chunks in ([(1, 0, 2), (0, 0, 2)], [(0, 2, 4)], [(0, 4, 5)])]
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
    for (name, found), (_, wanted) in zip(fused.named_parameters(), plain.named_parameters(), strict=True):
        if wanted.grad is not None:
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-3, atol=1e-4, msg=name)
    assert torch.equal(torch.cat(fed), states.detach()[[5, 6, 0, 1, 2, 3, 4]])


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_fused_cuda.py asks the GPU itself")
@pytest.mark.parametrize(("lengths", "recompute"), [(LENGTHS, 1), ((4, 4), 0)], ids=["uneven", "even"])
def test_gradients_of_layers_of_which_some_are_computed_again(lengths: tuple[int, ...], recompute: int) -> None:
    pytest.importorskip("triton")
    config = DecoderConfig("qwen2", 40, 24, 32, 2, 4, 2, 8, 64, qkv_bias=True)
    plain = Decoder.fresh(config, 1)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(6.0 if parameter.dim() == 2 else 1.2)
    weights = {name: tensor.clone() for name, tensor in plain.tensors().items()}
    fused = FusedDecoder.of(Decoder(config, weights), device=CPU, dtype=torch.float32)
    fused.layers[1].mlp_norm.requires_grad_(False)
    rows = torch.tensor([1, 4, 6])
    inputs = ModelInputs(torch.arange(sum(lengths)) * 5 % 40, positions(lengths))
    pull = torch.linspace(-1.0, 1.0, 3 * 24).view(3, 24)
    (plain(inputs, packed(lengths), rows=rows) * pull).sum().backward()
    with interpreted():
        states = fused(inputs, PackedAttend(lengths, CPU, invariant=False), rows=rows, recompute=recompute)
        (states * pull).sum().backward()
    for (name, found), (_, wanted) in zip(fused.named_parameters(), plain.named_parameters(), strict=True):
        if wanted.grad is None or not found.requires_grad:
            assert found.grad is None, name
        else:
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-3, atol=1e-4, msg=name)
