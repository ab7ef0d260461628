"""The backend `triton`: the kernel wheel's portable attention, for CUDA and ROCm."""

import torch

from .. import ops
from ..batch import ForwardBatch
from ..device import Device
from ..errors import ConfigError
from ..model_config import ModelConfig
from .base import AttentionBackend, AttentionSpec
from .paged import attend_by_kind


class TritonAttention(AttentionBackend):
    """Triton's kernel also where the wheel has a native one; a mixed batch is two calls, as in
    `PagedAttention`. Raises ConfigError without Triton."""

    def __init__(self, config: ModelConfig, device: Device) -> None:
        super().__init__(config, device)
        if not ops.has_triton():
            raise ConfigError("attention backend triton: Triton is not installed")

    @classmethod
    def supports(
        cls, config: ModelConfig, device: Device, kv_dtype: torch.dtype, page_size: int
    ) -> bool:
        return not device.is_cpu and kv_dtype != torch.int8 and ops.has_triton()

    def forward(
        self, layer: AttentionSpec, q: torch.Tensor, batch: ForwardBatch, out: torch.Tensor
    ) -> torch.Tensor:
        return attend_by_kind(layer, q, batch, out, implementation="triton")
