"""Tokens drawn on the device are those of the CPU sampler; a slot moves, stops and reports as a plain loop says."""

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from turnwise.engines.kernels import sampling
from turnwise.engines.kernels.dispatch import interpreted
from turnwise.engines.kernels.scores import score_rows
from turnwise.engines.samplers import sampling as cpu_sampling
from turnwise.engines.samplers.request import SamplingParams

Way = Callable[[], object]
WAYS = [
    pytest.param("reference"),
    pytest.param("interpreted", marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="no interpreter")),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]),
]


@pytest.fixture(params=WAYS)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the tensors of a test lie; in the interpreter the Triton kernels take them on the CPU."""
    if request.param == "interpreted":
        pytest.importorskip("triton")
    with interpreted() if request.param == "interpreted" else nullcontext():
        yield "cuda" if request.param == "cuda" else "cpu"
