"""What the kernels' speed becomes in an engine: `python -m bench.gpu_runtime --help`."""
