"""Rotary position embedding and the tables of its context extensions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

# Keys of a scaling mapping that the caller applies (base, rotary_dim) and keys each type reads.
_CALLERS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": (
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        set(),
    ),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"},
    ),
}


def rope_cos_sin_cache(
    rotary_dim: int,
    max_position: int,
    base: float,
    *,
    scaling: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """See `radix_kernels.rope_cos_sin_cache`."""
    settings = dict(scaling or {})
    kind = str(settings.get("rope_type") or settings.get("type") or "default")
    _check_scaling(kind, settings)
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    frequencies = float(base) ** -exponent
    magnitude = 1.0
    if kind == "linear":
        frequencies = frequencies / float(settings["factor"])
    elif kind == "llama3":
        frequencies = _llama3(frequencies, settings)
    elif kind == "yarn":
        frequencies, magnitude = _yarn(frequencies, rotary_dim, float(base), settings)
    positions = torch.arange(max_position, dtype=torch.float64)
    angles = positions[:, None] * frequencies
    return (torch.cat((angles.cos(), angles.sin()), -1) * magnitude).to(dtype)


def _check_scaling(kind: str, settings: Mapping[str, Any]) -> None:
    op = "rope_cos_sin_cache"
    if kind not in _KEYS:
        raise ValueError(f"{op}: rope_type is {kind!r}, expected one of {', '.join(_KEYS)}")
    required, optional = _KEYS[kind]
    given = {key for key, value in settings.items() if value is not None}
    missing = sorted(required - given)
    if missing:
        raise ValueError(f"{op}: {kind} scaling lacks {', '.join(missing)}")
    # Some files carry the original length beside types that do not read it.
    ignored = _CALLERS | {"original_max_position_embeddings"}
    unknown = sorted(given - required - optional - ignored)
    if unknown:
        raise ValueError(f"{op}: {kind} scaling has no {', '.join(unknown)}")


def _llama3(frequencies: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
    """Keep short wavelengths, divide long ones by factor, and blend between."""
    low = float(settings["low_freq_factor"])
    high = float(settings["high_freq_factor"])
    turns = float(settings["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / float(settings["factor"]))


def _yarn(
    frequencies: torch.Tensor, rotary_dim: int, base: float, settings: Mapping[str, Any]
) -> tuple[torch.Tensor, float]:
    """Frequencies blended between kept and divided by factor, and the attention factor."""
    factor = float(settings["factor"])
    original = float(settings["original_max_position_embeddings"])

    def dimension(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = dimension(float(settings.get("beta_fast") or 32))
    high = dimension(float(settings.get("beta_slow") or 1))
    if settings.get("truncate") is not False:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rotary_dim - 1)
    span = high - low if high != low else 0.001
    index = torch.arange(rotary_dim // 2, dtype=torch.float64)
    divided = ((index - low) / span).clamp(0, 1)
    return frequencies * (1 - divided + divided / factor), _yarn_magnitude(factor, settings)


def _yarn_magnitude(factor: float, settings: Mapping[str, Any]) -> float:
    given = settings.get("attention_factor")
    if given is not None:
        return float(given)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale = settings.get("mscale")
    mscale_all_dim = settings.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return magnitude(float(mscale)) / magnitude(float(mscale_all_dim))
    return magnitude(1.0)


def apply_rope_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    *,
    is_neox: bool = True,
    compute_dtype: torch.dtype = torch.float64,
) -> None:
    """See `radix_kernels.apply_rope_inplace`."""
    limit = cos_sin_cache.shape[0]
    if positions.device.type == "cpu" and positions.numel():
        low = int(positions.min())
        high = int(positions.max())
        if low < 0 or high >= limit:
            wrong = low if low < 0 else high
            raise ValueError(
                f"apply_rope_inplace: positions holds {wrong}, expected 0 .. {limit - 1}"
            )
    cos, sin = cos_sin_cache.to(compute_dtype)[positions.long()].unsqueeze(1).chunk(2, -1)
    for x in (query, key):
        if x is not None:
            heads = x if x.ndim == 3 else x.unflatten(1, (-1, head_size))
            _rotate(heads[..., : cos_sin_cache.shape[1]], cos, sin, is_neox, compute_dtype)


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox: bool, compute: torch.dtype
) -> None:
    if is_neox:
        first, second = x.chunk(2, -1)
    else:
        first = x[..., ::2]
        second = x[..., 1::2]
    a = first.to(compute)
    b = second.to(compute)
    # Both before either is written: a and b may be views of x.
    rotated_first = a * cos - b * sin
    rotated_second = b * cos + a * sin
    first.copy_(rotated_first)
    second.copy_(rotated_second)
