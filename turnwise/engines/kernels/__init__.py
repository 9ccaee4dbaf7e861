"""The operations a decoder is made of: Triton kernels on a GPU, the same sums in plain torch elsewhere."""
