"""Mixers that attend over a cache of keys and values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .norm import RmsNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding of the first `rotary_dim` elements of each head.

    `interleaved`: the pairs are (2i, 2i + 1) instead of (i, i + rotary_dim / 2). `scaling`: None
    for the plain form, else transformers' keys, with "rope_type" one of linear, llama3, yarn and
    longrope."""

    theta: float
    rotary_dim: int
    interleaved: bool = False
    scaling: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """Each head of q and k is normed alone; one weight [head_dim] for all heads of q, one for k."""

    norm: RmsNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class AllHeadsNorm:
    """All heads of q are normed together, and all heads of k; a weight for every element."""

    norm: RmsNorm


QkNorm = HeadNorm | AllHeadsNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionScale:
    """Queries at position p are multiplied by 1 + beta * log(1 + floor(p / period))."""

    beta: float
    period: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gqa:
    """Attention with grouped KV heads. Head counts are those of the whole model.

    A score is q k `scale`, then, with a `softcap`, softcap * tanh(score / softcap). `rope`: None
    for a layer without positions. `window`: how many tokens (itself included) a token sees, None
    for all. `sinks`: each query head has a learned logit that joins the softmax with no value."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QkNorm | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    position_scale: PositionScale | None = None

    def kv_heads_per_rank(self, ranks: int) -> int:
        """KV heads are split over the ranks, or repeated where there are fewer heads than ranks."""
        return max(1, self.num_kv_heads // ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """Multi-head latent attention (DeepSeek-V2, 2024, arXiv:2405.04434). Of a token the cache holds
    `latent_dim` values, normed, from which each head's key and value are products, and `rope_dim`
    rotary values that all heads share.

    A head's query and key have `nope_dim` elements without positions, then `rope_dim` rotary ones;
    its value has `value_dim`. Scores are multiplied by `scale`. `query_latent_dim`: queries too are
    a product of so many normed latent values; None: of the hidden state. `norm`: of the latent
    values. `bias`: the products that lead to latent values, and the output, have one."""

    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    latent_dim: int
    query_latent_dim: int | None
    rope: Rope
    scale: float
    norm: RmsNorm
    bias: bool = False
