"""KvLayout: what the KV cache holds of each token. The one place that knows; pools, budgets and
transfers follow it."""

import math
from dataclasses import dataclass

import torch

from ..errors import ConfigError
from ..specs import Gqa, Mixer, Mla, ModelSpec

# Types of the KV cache beside the floating-point ones, by their names in --kv-cache-dtype.
_SMALL_TYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
# A latent token in FP8: 512 e4m3, 4 float32 scales of 128 values each, 64 bfloat16.
_FP8_LATENT = (512, 64)
_FP8_LATENT_BYTES = 656


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPart:
    """An array that a layer keeps of each token: `shape`, of this rank, in `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The parts of every layer, in pages of `page_size` tokens.

        k, v              [KV heads of this rank, head_dim]   attention with grouped KV heads
        k_scale, v_scale  [KV heads of this rank]             of INT8 keys and values
        latent            [latent + rotary values]            latent attention; whole on every rank
                          [656] bytes in FP8

    `query_dtype`: of the queries that meet the cache, and of what attention returns.
    `constant_scales`: keys and values are FP8, divided by a scale a layer: 1, or that of the
    checkpoint."""

    page_size: int
    query_dtype: torch.dtype
    layers: tuple[tuple[KvPart, ...], ...]
    constant_scales: bool = False

    @property
    def page_bytes(self) -> int:
        """Bytes that a page takes in all layers, on this rank."""
        tokens = sum(part.token_bytes for parts in self.layers for part in parts)
        return tokens * self.page_size


def kv_dtype_named(name: str, dtype: torch.dtype) -> torch.dtype:
    """The type of a KV cache by its name in --kv-cache-dtype; `dtype`: the model's, which is
    "auto"."""
    if name == "auto":
        return dtype
    return _SMALL_TYPES.get(name) or getattr(torch, name)


def kv_layout(
    spec: ModelSpec, *, kv_dtype: torch.dtype, dtype: torch.dtype, page_size: int, ranks: int
) -> KvLayout:
    """What one of `ranks` ranks keeps of a model that computes in `dtype`. Raises ConfigError."""
    is_small = kv_dtype in _SMALL_TYPES.values()
    layers = tuple(_parts(layer.mixer, kv_dtype, dtype, ranks) for layer in spec.layers)
    return KvLayout(
        page_size=page_size,
        query_dtype=dtype if is_small else kv_dtype,
        layers=layers,
        constant_scales=kv_dtype == torch.float8_e4m3fn and not spec.keeps_latents,
    )


def _parts(
    mixer: Mixer, kv_dtype: torch.dtype, dtype: torch.dtype, ranks: int
) -> tuple[KvPart, ...]:
    if isinstance(mixer, Mla):
        return (_latent(mixer, kv_dtype, dtype),)
    return _keys_and_values(mixer, kv_dtype, ranks)


def _latent(mixer: Mla, kv_dtype: torch.dtype, dtype: torch.dtype) -> KvPart:
    size = (mixer.latent_dim, mixer.rope_dim)
    if kv_dtype == torch.int8:
        raise ConfigError("--kv-cache-dtype int8: latent values have no INT8 form")
    if kv_dtype != torch.float8_e4m3fn:
        return KvPart(name="latent", shape=(sum(size),), dtype=kv_dtype)
    if size != _FP8_LATENT or dtype != torch.bfloat16:
        raise ConfigError(
            f"--kv-cache-dtype fp8_e4m3 is for 512 latent and 64 rotary values in bfloat16, not "
            f"{size[0]} and {size[1]} in {str(dtype).removeprefix('torch.')}"
        )
    return KvPart(name="latent", shape=(_FP8_LATENT_BYTES,), dtype=torch.uint8)


def _keys_and_values(mixer: Gqa, kv_dtype: torch.dtype, ranks: int) -> tuple[KvPart, ...]:
    heads = mixer.kv_heads_per_rank(ranks)
    shape = (heads, mixer.head_dim)
    parts = [KvPart(name=name, shape=shape, dtype=kv_dtype) for name in ("k", "v")]
    if kv_dtype == torch.int8:
        for name in ("k_scale", "v_scale"):
            parts.append(KvPart(name=name, shape=(heads,), dtype=torch.float32))
    return tuple(parts)
