"""Triton kernels of the training step on a GPU; imported only where there is one.

Each does in one pass over memory what the torch code beside its caller does in several, in the same arithmetic: fp32
inside, the caller's dtypes outside. No kernel adds into memory that another program writes: two runs give equal bits.
"""
