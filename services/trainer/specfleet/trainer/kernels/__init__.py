"""Triton kernels behind functions of the strategies. Nothing here is imported unless a tensor is on a GPU."""
