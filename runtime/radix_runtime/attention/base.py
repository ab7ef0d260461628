"""AttentionBackend: how attention over the paged KV cache is computed."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from ..batch import ForwardBatch
from ..device import Device
from ..model_config import ModelConfig
from ..shortcuts import reset_shortcuts


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One attention layer; head counts are this rank's. `window`: how many tokens a token sees,
    itself included; None for all."""

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None


class AttentionBackend(ABC):
    """Only reads the KV cache, in which the step's keys and values are already. One instance serves
    all layers of a rank."""

    # Whether `forward` gives the bits of the wheel's `flash_attn_with_kvcache`, so that the wheel's
    # `DenseDecoder`, which contains it, may run instead of the layers. Not inherited by a subclass
    # that overrides `forward`.
    supports_fused_decoder = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        reset_shortcuts(cls, AttentionBackend, "forward", ["supports_fused_decoder"])

    def __init__(self, config: ModelConfig, device: Device) -> None:
        self.config = config
        self.device = device

    @classmethod
    @abstractmethod
    def supports(
        cls, config: ModelConfig, device: Device, kv_dtype: torch.dtype, page_size: int
    ) -> bool:
        """Whether this backend can run the model there. Must not raise."""

    def plan(self, batch: ForwardBatch) -> None:  # noqa: B027
        """Called once a step after `batch.load`, before the model; may set `batch.metadata`."""

    @abstractmethod
    def forward(
        self, layer: AttentionSpec, q: torch.Tensor, batch: ForwardBatch, out: torch.Tensor
    ) -> torch.Tensor:
        """Causal attention of q [T, num_heads, head_dim] over `batch.kv_pool`, into `out` of the
        same shape. Returns `out`; does not synchronise."""
