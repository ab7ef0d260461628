"""AttentionBackend: how attention over the paged KV cache is computed."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..batch import ForwardBatch
from ..device import Device
from ..model_config import ModelConfig
from ..shortcuts import reset_shortcuts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionSpec:
    """What a backend must know of one attention layer. Head counts are this rank's.

    Query head h reads KV head h // (num_heads // num_kv_heads); the heads of all layers have
    `head_dim` elements, keys and values alike. A score is q k `scale`, then, with a `softcap`,
    softcap * tanh(score / softcap). `window`: how many tokens a token sees, itself included; None
    for all. `sinks`: a logit for each query head that joins the softmax with no value, float32
    [num_heads] on the model's device; the model owns it.

    Raises ValueError for what no backend can compute."""

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads are no multiple of {self.num_kv_heads} KV heads"
            )
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale is {self.scale}, expected a positive number")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}, expected 1 or more")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise ValueError(f"softcap is {self.softcap}, expected a positive number")
        if self.sinks is not None:
            found = (self.sinks.dtype, tuple(self.sinks.shape))
            if found != (torch.float32, (self.num_heads,)):
                raise ValueError(
                    f"sinks are {found[0]} {list(found[1])}, expected float32 [{self.num_heads}]"
                )


# From cached latent values [N, latent_dim] to each head's keys without positions [N, num_heads,
# nope_dim] and values [N, num_heads, value_dim].
Expand = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """What a backend must know of one layer of latent attention (specs.Mla). `num_heads` is this
    rank's. The cached latent values, with the rotary values behind them, are the one key of all
    absorbed queries, and its value without them; scores are multiplied by `scale`."""

    layer_id: int
    num_heads: int
    latent_dim: int
    rope_dim: int
    scale: float


class AttentionBackend(ABC):
    """Only reads the KV cache, in which the step's keys and values are already. One instance serves
    all layers of a rank, and honours every field of their specs."""

    # Whether `forward` gives the bits of the wheel's `flash_attn_with_kvcache`, so that the wheel's
    # `Decoder`, which contains it, may run instead of the layers. Not inherited by a subclass
    # that overrides `forward`.
    supports_fused_decoder = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        reset_shortcuts(cls, AttentionBackend, "forward", ["supports_fused_decoder"])

    # Whether it has `decode_latents` and `prefill_latents`.
    supports_latents = False

    capturable = True  # a CUDA graph can hold `forward`: it does not wait for the device
    expands_decode = True  # takes q tokens of a decode entry as q entries of one token

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
        """Prepares a step: what `forward` needs of the batch that is the same for all layers. The
        model runner calls it once a step, after `batch.upload` and before `batch.fill` and the
        model, on the same stream; the result may be left in `batch.metadata`. Does not synchronise.

        A CUDA graph may hold `batch.fill` and the model's forward, never this call, which is made
        before the capture and before every replay. So what `forward` reads on the device lies at
        fixed addresses: `plan` writes in place, into buffers that the backend allocates once, on
        its first call, for the largest batch (`batch.max_batch`, `batch.max_tokens`). And what
        `forward` reads on the host depends on the batch's shape alone (`batch_size`, `num_tokens`,
        `max_query_len`, `has_chunks`; in a step without chunks `num_decode`), for which the graph
        was captured.

        The default is for backends that need nothing but the batch."""

    @abstractmethod
    def forward(
        self, layer: AttentionSpec, q: torch.Tensor, batch: ForwardBatch, out: torch.Tensor
    ) -> torch.Tensor:
        """Causal attention of q [T, num_heads, head_dim], of the layout's `query_dtype`, over
        `batch.kv_pool`, into `out` of the same shape and dtype. Returns `out`; does not
        synchronise."""

    def decode_latents(
        self,
        layer: LatentSpec,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Causal attention of the decode entries' tokens in the absorbed form: q_latent [T,
        num_heads, latent_dim] and q_rope [T, num_heads, rope_dim], of the layout's `query_dtype`,
        over the latents of `batch.kv_pool`, into `out`, of q_latent's shape and dtype. Returns
        `out`; does not synchronise."""
        raise NotImplementedError(f"{type(self).__name__} has no latent attention")

    def prefill_latents(
        self,
        layer: LatentSpec,
        q: torch.Tensor,
        expand: Expand,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Causal attention of the chunks' tokens: q [T, num_heads, nope_dim + rotary values] over
        the keys and values that `expand` makes of the cached latents, into `out` [T, num_heads,
        value_dim]. Returns `out`."""
        raise NotImplementedError(f"{type(self).__name__} has no latent attention")
