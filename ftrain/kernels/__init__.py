"""GPU kernels in Triton, each beside the plain PyTorch function that says what it computes.

A kernel is used where it runs (CUDA with Triton) and gives the plain function's numbers to the bit; everywhere else
the plain function is what runs. Triton is imported when a kernel is first launched.
"""

from importlib.util import find_spec

HAS_TRITON = find_spec("triton") is not None
