"""Writing keys and values into the paged cache."""

from __future__ import annotations

import torch


def store_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """See `radix_kernels.store_kv_cache`. Bits are copied, or defined in float32: there is no
    compute dtype."""
    pages, page_size = k_cache.shape[:2]
    if slot_mapping.device.type == "cpu" and slot_mapping.numel():
        low = int(slot_mapping.min())
        high = int(slot_mapping.max())
        end = pages * page_size
        if low < -1 or high >= end:
            wrong = low if low < -1 else high
            raise ValueError(
                f"store_kv_cache: slot_mapping holds {wrong}, expected -1 .. {end - 1}"
            )
    rows = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[rows]
    where = (slots // page_size, slots % page_size) if page_size else (slots, slots)
    for x, cache, scales in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if scales is None:
            cache[where] = x[rows]
        elif cache.dtype == torch.int8:
            cache[where], scales[where] = quantize(x[rows])
        else:
            # As bytes: torch does not index every FP8 dtype.
            cache.view(torch.uint8)[where] = to_fp8(x[rows], scales, cache.dtype).view(torch.uint8)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 values of [T, H, D] and their scales [T, H]."""
    wide = x.float()
    scale = wide.abs().amax(-1) / 127
    values = torch.where(scale[..., None] > 0, wide / scale[..., None], 0.0)
    return values.round().to(torch.int8), scale


def to_fp8(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[T, H, D] / scale, [1] or [H], to nearest even; beyond the largest finite value that value.
    NaN stays NaN."""
    largest = torch.finfo(dtype).max
    return (x.float() / scale[:, None]).clamp(-largest, largest).to(dtype)
