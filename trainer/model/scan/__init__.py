"""The gated recurrence on CUDA: its Triton kernels and their operator."""
