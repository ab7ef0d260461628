"""AttentionBackend: how attention over the paged KV cache is computed."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ..batch import ForwardBatch
from ..device import Device
from ..model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer; head counts are this rank's. `window`: tokens that a token sees with
    itself; None: all."""

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None


class AttentionBackend(ABC):
    """Only reads the KV cache, in which the step's keys and values are already. One instance serves
    all layers."""

    expands_decode = True  # takes q tokens of a decode entry as q entries of one token

    def __init__(self, config: ModelConfig, device: Device) -> None:
        self.config, self.device = config, device

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
