"""Scores and their gradients are those of autograd in float64, chunk by chunk, for every shape of logits."""

import pytest
import torch
from torch import Tensor

from turnwise.engines.kernels.logprobs import score_gradient, score_rows
from turnwise.engines.model.token_logprobs import PLAIN_LOGITS, LogitShape, token_scores


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(logits / (temperature or 1.0), -1)
    return logp.gather(1, targets.unsqueeze(1)).squeeze(1), torch.special.entr(logp.exp()).sum(-1)


@pytest.mark.parametrize(("count", "vocab"), [(3, 1), (9, 5), (5, 4096), (4, 9001)])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_scores_and_gradients_are_those_of_autograd(device: str, count: int, vocab: int, temperature: float) -> None:
    logits, targets = normal(count, vocab) * 3, torch.arange(count) * 7919 % vocab
    by_logprob, by_entropy = normal(count, seed=1), normal(count, seed=2)
    wide = logits.double().requires_grad_()
    wanted = exact(wide, targets, temperature)
    on_device = logits.to(device)
    found = score_rows(on_device, targets.to(device), temperature)
    for name, value in zip(("logprobs", "entropies"), wanted, strict=True):
        torch.testing.assert_close(getattr(found, name).cpu().double(), value.detach(), atol=4e-6, rtol=2e-6)
    for pulls in ((by_logprob, by_entropy), (by_logprob, None), (None, by_entropy)):
        loss = sum((v * p.double()).sum() for v, p in zip(wanted, pulls, strict=True) if p is not None)
        (gradient,) = torch.autograd.grad(loss, wide, retain_graph=True)
        given = (found.lse, found.entropies, *(p if p is None else p.to(device) for p in pulls))
        narrow = score_gradient(on_device, targets.to(device), *given, temperature, torch.bfloat16)
        full = score_gradient(on_device, targets.to(device), *given, temperature, torch.float32)
        torch.testing.assert_close(full.cpu().double(), gradient, atol=2e-6, rtol=2e-5)
        torch.testing.assert_close(narrow.float(), full, atol=0, rtol=2**-7)  # the interpreter cuts, a GPU rounds


def test_tokens_that_cannot_happen_take_no_part(device: str) -> None:
    logits = torch.zeros(3, 9000)
    logits[0, :8998] = -torch.inf
    logits[1, 5:] = -torch.inf
    targets = torch.tensor([8999, 4, 0])
    found = score_rows(logits.to(device), targets.to(device), 1.0)
    wanted = torch.tensor([2.0, 5.0, 9000.0]).log()
    torch.testing.assert_close(found.logprobs.cpu(), -wanted, atol=2e-6, rtol=0)
    torch.testing.assert_close(found.entropies.cpu(), wanted, atol=1e-5, rtol=0)
    ones = torch.ones(3).to(device)
    given = (logits.to(device), targets.to(device), found.lse, found.entropies, ones, ones)
    gradient = score_gradient(*given, 1.0, torch.float32)
    assert gradient.isfinite().all() and (gradient.cpu()[logits == -torch.inf] == 0.0).all()


def test_rows_without_a_distribution_score_nan(device: str) -> None:
    logits = torch.zeros(4, 5000)
    logits[1, 4999] = torch.nan
    logits[2] = -torch.inf
    found = score_rows(logits.to(device), torch.zeros(4, dtype=torch.int64, device=device), 1.0)
    for values in found[:2]:
        assert values.isnan().tolist() == [False, True, True, False]


SHAPES = [PLAIN_LOGITS, LogitShape(scale=0.3), LogitShape(scale=2.0, softcap=4.0)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [3, 16])
@pytest.mark.parametrize("biased", [False, True])
def test_token_scores_have_the_gradients_of_autograd(device: str, shape: LogitShape, chunk: int, biased: bool) -> None:
    hidden, weight, bias = normal(7, 12), normal(300, 12, seed=1), normal(300, seed=2)
    targets = torch.arange(7) * 41
    loss_by = normal(2, 7, seed=3)

    def scores_and_gradients(place: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(place, dtype).requires_grad_() for t in (hidden, weight, bias)]
        h, w, b = leaves
        found = token_scores(
            h, w, targets.to(place), temperature=0.8, chunk=chunk, bias=b if biased else None, shape=shape
        )
        loss = sum((f * by.to(f)).sum() for f, by in zip(found, loss_by, strict=True))
        wanted = leaves if biased else leaves[:2]
        return [*found, *torch.autograd.grad(loss, wanted)]

    wanted = scores_and_gradients("cpu", torch.float64)
    for exact_value, found in zip(wanted, scores_and_gradients(device, torch.float32), strict=True):
        torch.testing.assert_close(found.detach().cpu().double(), exact_value.detach(), atol=3e-5, rtol=1e-4)


def test_narrow_factors_give_wide_scores_and_gradients_in_their_own_format(device: str) -> None:
    hidden, weight = normal(9, 16).bfloat16(), normal(200, 16, seed=1).bfloat16()
    targets = torch.arange(9)

    def run(place: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        h, w = hidden.to(place, dtype).requires_grad_(), weight.to(place, dtype).requires_grad_()
        logprobs, _ = token_scores(h, w, targets.to(place), temperature=1.0, chunk=4)
        to_h, to_w = torch.autograd.grad(logprobs.sum(), (h, w))
        assert to_h.dtype == to_w.dtype == dtype and logprobs.dtype != torch.bfloat16
        return logprobs.detach().cpu().double(), to_h.cpu().double(), to_w.cpu().double()

    wanted, found = run("cpu", torch.float64), run(device, torch.bfloat16)
    torch.testing.assert_close(found[0], wanted[0], atol=0.05, rtol=0.01)
    for narrow, wide in zip(found[1:], wanted[1:], strict=True):
        assert (narrow - wide).norm() < 0.02 * wide.norm()


def test_no_targets_have_no_scores_and_no_pull(device: str) -> None:
    hidden, weight = normal(0, 8).to(device).requires_grad_(), normal(30, 8).to(device).requires_grad_()
    logprobs, entropy = token_scores(
        hidden, weight, torch.zeros(0, dtype=torch.int64, device=device), temperature=1.0, chunk=4
    )
    (logprobs.sum() + entropy.sum()).backward()
    assert len(logprobs) == len(entropy) == 0
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_scores_a_row_the_same_in_any_batch_and_chunk() -> None:
    hidden, weight = (normal(700, 576, seed=3)).cuda().bfloat16(), (normal(49152, 576, seed=4) * 0.05).cuda().bfloat16()
    targets = torch.arange(700).cuda() * 61
    runs = [
        token_scores(hidden, weight, targets, temperature=0.9, chunk=chunk, invariant=True) for chunk in (700, 256, 37)
    ]
    for logprobs, entropy in runs[1:]:
        assert torch.equal(logprobs, runs[0][0]) and torch.equal(entropy, runs[0][1])
    logits = torch.mm(hidden.float(), weight.float().t())
    wanted = exact(logits.double(), targets, 0.9)
    for found, value in zip(runs[0], wanted, strict=True):
        torch.testing.assert_close(found.double(), value, atol=2e-3, rtol=1e-4)
    wide = hidden.clone().requires_grad_()
    loss = token_scores(wide, weight, targets, temperature=0.9, chunk=256)[0].sum()
    assert loss.isfinite()
    (gradient,) = torch.autograd.grad(loss, wide)
    p = torch.softmax(logits / 0.9, -1)
    direct = (torch.nn.functional.one_hot(targets, 49152).float() - p) @ weight.float() / 0.9
    assert (gradient.float() - direct).norm() < 0.02 * direct.norm()
