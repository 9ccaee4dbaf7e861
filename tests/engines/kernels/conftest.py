"""Kernels are tried by Triton's interpreter where there is no GPU, which must be said before triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
