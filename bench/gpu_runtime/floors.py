"""The least that a decode step can take on a GPU: what it must read and multiply."""

from __future__ import annotations

from dataclasses import dataclass

from bench.serving.model_shape import ModelShape

# The kinds of models whose sizes tell what a step multiplies.
DENSE = ("llama", "mistral", "qwen2", "qwen3")
_BYTES = 2  # of a bfloat16 number


@dataclass(frozen=True)
class Gpu:
    """What a GPU reaches, measured: `read_gbs` GB/s of a plain read, `tflops` of a large product in
    bfloat16. The defaults are an H200's."""

    read_gbs: float = 4480.0
    tflops: float = 684.0


def decode_floor_ms(shape: ModelShape, rows: int, context: int, gpu: Gpu) -> float:
    """Milliseconds of a step of so many rows of `context` tokens: its products, by bytes or by
    operations, whichever takes longer, then the reading of its keys and values."""
    weights = shape.step_numbers
    by_bytes = _BYTES * weights / (gpu.read_gbs * 1e9)
    by_operations = 2 * weights * rows / (gpu.tflops * 1e12)
    cache = _BYTES * shape.kv_numbers * rows * context / (gpu.read_gbs * 1e9)
    return 1e3 * (max(by_bytes, by_operations) + cache)
