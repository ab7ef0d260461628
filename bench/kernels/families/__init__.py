"""The cases of each family: shapes of real models, our op, and what the peers offer for the same.

A family is a function (device, dtype) -> cases. Its contenders are "radix", "torch" where torch has
the op, and any library that `peers.load` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ..harness import Case
from .attention import attention
from .ends import ends
from .gemm import gemm
from .grouped import grouped
from .layer import layer
from .linear import linear
from .mla import mla
from .moe import moe
from .packed_experts import packed_experts
from .pointwise import pointwise
from .quantize import quantize
from .quantized import quantized
from .quantized_experts import quantized_experts
from .sampling import sampling
from .step import step

FAMILIES: dict[str, Callable[[torch.device, torch.dtype], Iterator[Case]]] = {
    "pointwise": pointwise,
    "linear": linear,
    "gemm": gemm,
    "quantize": quantize,
    "ends": ends,
    "quantized": quantized,
    "layer": layer,
    "attention": attention,
    "mla": mla,
    "moe": moe,
    "packed_experts": packed_experts,
    "quantized_experts": quantized_experts,
    "grouped": grouped,
    "sampling": sampling,
    "step": step,
}
