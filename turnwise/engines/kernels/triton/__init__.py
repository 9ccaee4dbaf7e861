"""The kernels in Triton; each has a reference in plain torch in the folder above."""
