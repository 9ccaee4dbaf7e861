"""Kernels of the native decoder: Triton on a GPU, the same in plain torch elsewhere; nothing here knows a model."""
