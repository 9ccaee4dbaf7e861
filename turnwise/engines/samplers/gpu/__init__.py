"""The sampler of one NVIDIA GPU: batching over a paged cache, CUDA graphs, and its memory."""
