"""The sampler of the CPU: batching, proven thread counts, and products in a layout of its own."""
