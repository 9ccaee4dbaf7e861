"""Direct launches of Triton kernels: the same results as Triton's own, for every class of arguments it compiles for."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from turnwise.engines.kernels.triton.launch import Launcher  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU")
BLOCK = 64


@triton.jit
def _strided(X, Y, count, stride, factor, BLOCK: tl.constexpr, ADD_ONE: tl.constexpr):
    """y[i] = x[i * stride] * factor, by as many programs as there are blocks."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + place.to(tl.int64) * stride, mask=place < count, other=0.0).to(tl.float32) * factor
    if ADD_ONE:
        x += 1.0
    tl.store(Y + place, x.to(Y.dtype.element_ty), mask=place < count)


CASES = [
    (count, stride, shift, dtype, add)
    for count in (1, 16, 100)
    for stride in (1, 3, 16)
    for shift in (0, 1)
    for dtype in (torch.float32, torch.bfloat16)
    for add in (False, True)
]


def test_every_class_of_arguments_comes_out_as_torch_says_each_time() -> None:
    launch = Launcher(_strided)
    numbers = torch.arange(1.0, 2000.0, device=DEVICE)
    for turn in range(3):  # the first time by Triton itself, then directly, among launches of all other classes
        for count, stride, shift, dtype, add in CASES:
            x, factor = numbers.to(dtype)[shift + turn :], 0.5 + turn
            y = torch.zeros(count + shift, dtype=torch.float32, device=DEVICE)[shift:]
            launch(-(-count // BLOCK), (x, y), (count, stride, factor), (BLOCK, add), num_warps=1)
            expected = x[: count * stride : stride].float() * factor + float(add)
            assert torch.equal(y, expected), (turn, count, stride, shift, dtype, add)


@pytest.mark.gpu
@needs_gpu
def test_what_was_launched_once_is_launched_directly() -> None:
    launch = Launcher(_strided)
    x, y = (torch.ones(256, device=DEVICE) for _ in range(2))
    for count in (32, 64, 96, 128):
        launch(-(-count // BLOCK), (x, y), (count, 1, 3.0), (BLOCK, False), num_warps=1)
    assert len(launch._compiled) == 1, "counts that 16 divides are one class"
    launch(1, (x[1:], y), (32, 1, 2.0), (BLOCK, False), num_warps=1)
    launch(1, (x, y), (33, 1, 2.0), (BLOCK, False), num_warps=1)
    launch(1, (x, y), (33, 1, 2.0), (BLOCK, True), num_warps=1)
    launch(1, (x, y), (33, 1, 2.0), (BLOCK, True), num_warps=2)
    assert len(launch._compiled) == 5
    with pytest.raises(ValueError, match="cannot be accessed"):
        launch(1, (x.cpu(), y), (32, 1, 2.0), (BLOCK, False), num_warps=1)


@pytest.mark.gpu
@needs_gpu
def test_a_direct_launch_goes_to_the_current_stream_and_into_graphs() -> None:
    launch = Launcher(_strided)
    x, y = torch.ones(64, device=DEVICE), torch.zeros(64, device=DEVICE)
    for _ in range(2):
        launch(1, (x, y), (64, 1, 3.0), (BLOCK, False), num_warps=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(1, (x, y), (64, 1, 3.0), (BLOCK, False), num_warps=1)
    x.fill_(5.0)
    y.zero_()
    graph.replay()
    assert y.tolist() == [15.0] * 64
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        torch.cuda._sleep(10_000_000)
        x.fill_(7.0)
        launch(1, (x, y), (64, 1, 3.0), (BLOCK, False), num_warps=1)
    stream.synchronize()
    assert y.tolist() == [21.0] * 64
