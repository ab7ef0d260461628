"""AttentionBackend: how attention over the paged KV cache is computed."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ..batch import ForwardBatch
from ..device import Device
from ..model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a backend must know of one attention layer; head counts are this rank's. `window`: tokens that a token sees,
    itself included; None for all."""

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None


class AttentionBackend(ABC):
    """A backend only reads the KV cache; the attention layer has stored the step's keys and values before. One instance
    serves all layers of a rank. The methods with a body have nothing to do unless a backend keeps state of its own."""

    def __init__(self, config: ModelConfig, device: Device) -> None:
        self.config, self.device = config, device

    @classmethod
    @abstractmethod
    def supports(cls, config: ModelConfig, device: Device, kv_dtype: torch.dtype, page_size: int) -> bool:
        """Whether this backend can run the model there. Must not raise."""

    def plan(self, batch: ForwardBatch) -> None:  # noqa: B027
        """Called once a step after `batch.load`, before the model; may set `batch.metadata`."""

    @abstractmethod
    def forward(self, layer: AttentionSpec, q: torch.Tensor, batch: ForwardBatch, out: torch.Tensor) -> torch.Tensor:
        """Causal attention of q [T, num_heads, head_dim] over `batch.kv_pool`, into `out` of the same shape (rows past
        num_tokens: anything finite). Returns `out`; does not synchronise."""

    def graph_buffers(self, max_rows: int) -> None:  # noqa: B027
        """Allocates what `plan` writes for a captured decode graph of up to `max_rows` rows."""
