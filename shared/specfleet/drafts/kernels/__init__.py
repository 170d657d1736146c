"""Triton kernels behind functions of `specfleet.drafts`. Nothing here is imported unless a tensor is on a GPU."""
