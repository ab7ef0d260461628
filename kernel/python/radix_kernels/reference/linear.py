"""Dense layers and embedding lookup."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ._out import finish


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """See `radix_kernels.linear`; weight is the unpacked [N, K]."""
    wide_bias = None if bias is None else bias.to(compute_dtype)
    result = F.linear(x.to(compute_dtype), weight.to(compute_dtype), wide_bias)
    if residual is not None:
        result = result + residual.to(compute_dtype)
    return finish(result, out, out_dtype or x.dtype)


def linear_argmax(
    x: torch.Tensor, weight: torch.Tensor, *, compute_dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `radix_kernels.linear_argmax`; weight is the unpacked [N, K]."""
    return row_argmax(linear(x, weight, out_dtype=torch.float32, compute_dtype=compute_dtype))


def linear_heads(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """See `radix_kernels.linear_heads`; weight is the unpacked [H, N, K]."""
    result = torch.einsum("thk,hnk->thn", x.to(compute_dtype), weight.to(compute_dtype))
    return finish(result, out, x.dtype)


def row_argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The greedy draw of each row of [T, N]: (ids int32 [T], their logits [T]); -1 and NaN for a
    row that has no finite largest logit."""
    # A NaN counts as the largest; of equal values argmax gives the first.
    largest = logits.amax(1)
    ids = logits.argmax(1)
    found = largest.isfinite()
    return ids.masked_fill(~found, -1).to(torch.int32), largest.masked_fill(~found, torch.nan)


def embedding(
    ids: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `radix_kernels.embedding`; bits are copied, so there is no compute dtype."""
    if ids.device.type == "cpu" and ids.numel():
        low = int(ids.min())
        high = int(ids.max())
        if low < 0 or high >= weight.shape[0]:
            wrong = low if low < 0 else high
            raise ValueError(f"embedding: ids holds {wrong}, expected 0 .. {weight.shape[0] - 1}")
    return finish(weight[ids.long()], out, weight.dtype)


def quantize_weight(w: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `radix_kernels.pack_weight` makes of a float weight [N, K]: (codes [N, K] int16, scales
    [N, G]).

    codes -127 .. 127 with float32 (group 0: whole rows) or bfloat16 scales; of 4 bits 0 .. 15, with
    8 for zero.
    """
    pieces = _groups(w.float(), group)
    largest = pieces.gather(-1, pieces.abs().argmax(-1, keepdim=True)).squeeze(-1)
    # By a tensor: CUDA multiplies by the inverse of a number, which may be a bit off.
    exact = largest.abs() / largest.new_tensor(127) if bits == 8 else largest / -8
    scales = exact.to(torch.bfloat16 if group else torch.float32)
    wide = scales.float().unsqueeze(-1)
    steps = torch.where(wide != 0, pieces / wide, 0.0).round()
    codes = steps.clamp(-127, 127) if bits == 8 else steps.clamp(-8, 7) + 8
    return codes.flatten(1)[:, : w.shape[1]].to(torch.int16), scales


def dequantize_weight(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    mins: torch.Tensor | None = None,
) -> torch.Tensor:
    """(code - zero) * scale + min in float64: [N, K] codes, [N, G] scales, zeros and mins (None:
    0)."""
    k = codes.shape[1]
    values = codes.double()
    if zeros is not None:
        values = values - zeros.double().repeat_interleave(group or k, 1)[:, :k]
    values = values * scales.double().repeat_interleave(group or k, 1)[:, :k]
    if mins is not None:
        values = values + mins.double().repeat_interleave(group or k, 1)[:, :k]
    return values


def quantize_rows(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] as `linear` takes it for `w8a8` and `w4a8`: (codes [T, K] int8, float32 scales [T,
    G])."""
    pieces = _groups(x.float(), group)
    largest = pieces.abs().amax(-1)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0.0)  # one rounding
    inverse = torch.where(inverse < 3e38, inverse, 0.0)
    codes = (pieces * inverse.unsqueeze(-1)).round()
    finite = pieces.isfinite().all(-1)
    codes = torch.where(finite.unsqueeze(-1), codes, 0.0)
    scales = torch.where(finite, largest / 127, torch.nan)
    return codes.flatten(1)[:, : x.shape[1]].to(torch.int8), scales


def _groups(x: torch.Tensor, group: int) -> torch.Tensor:
    """[R, K] -> [R, G, group], zeros beyond K."""
    rows, k = x.shape
    size = group or k
    return F.pad(x, (0, -k % size)).view(rows, -(-k // size), size)
