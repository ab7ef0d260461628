"""KvLayout: what the KV cache holds of each token. The one place that knows; pools, budgets and
transfers follow it."""

import math
from dataclasses import dataclass

import torch

from .. import ops
from ..errors import ConfigError
from ..specs import Gqa, Mixer, Mla, ModelSpec

# Bytes: where a part of a page may begin. Kernels copy 16 at a time.
_ALIGNMENT = 16
# FP8 keys and values are divided by one scale a layer. What 1, and a checkpoint's scale, is
# multiplied with: checkpoints mean OCP's format, and a code of an MI300's stands for half as much.
_FP8_UNITS = {torch.float8_e4m3fn: 1.0, torch.float8_e4m3fnuz: 2.0}
FP8_TYPES = tuple(_FP8_UNITS)
# A latent token in FP8: 512 e4m3, OCP's on every chip, 4 float32 scales of 128 values each,
# 64 bfloat16.
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
    `scale_unit`: of FP8 keys and values, which are divided by one scale a layer: by this, times the
    checkpoint's scale where it has one. 1, or 2 in float8_e4m3fnuz. None of other types."""

    page_size: int
    query_dtype: torch.dtype
    layers: tuple[tuple[KvPart, ...], ...]
    scale_unit: float | None = None

    def part_bytes(self, part: KvPart) -> int:
        """Bytes of the part in a page, up to where the next one may begin."""
        return -(-part.token_bytes * self.page_size // _ALIGNMENT) * _ALIGNMENT

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers, on this rank."""
        return sum(part.token_bytes for parts in self.layers for part in parts)

    @property
    def page_bytes(self) -> int:
        """Bytes that a page takes in all layers, on this rank."""
        return sum(self.part_bytes(part) for parts in self.layers for part in parts)


def kv_dtype_named(name: str, dtype: torch.dtype) -> torch.dtype:
    """The type of a KV cache by its name in --kv-cache-dtype; `dtype`: the model's, which is
    "auto". "fp8_e4m3" is the chip's: float8_e4m3fnuz on an MI300, else float8_e4m3fn."""
    if name == "auto":
        return dtype
    named: torch.dtype = getattr(torch, ops.fp8_format() if name == "fp8_e4m3" else name)
    return named


def kv_layout(
    spec: ModelSpec, *, kv_dtype: torch.dtype, dtype: torch.dtype, page_size: int, ranks: int
) -> KvLayout:
    """What one of `ranks` ranks keeps of a model that computes in `dtype`. Raises ConfigError."""
    is_small = kv_dtype == torch.int8 or kv_dtype in FP8_TYPES
    layers = tuple(_parts(layer.mixer, kv_dtype, dtype, ranks) for layer in spec.layers)
    return KvLayout(
        page_size=page_size,
        query_dtype=dtype if is_small else kv_dtype,
        layers=layers,
        scale_unit=None if spec.keeps_latents else _FP8_UNITS.get(kv_dtype),
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
    if kv_dtype not in FP8_TYPES:
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
