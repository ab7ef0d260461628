"""Kernel microbenchmarks: `python -m bench.kernels FAMILY`."""
