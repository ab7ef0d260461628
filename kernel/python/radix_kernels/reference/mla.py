"""Multi-head latent attention, absorbed form, one row at a time."""

from __future__ import annotations

import torch

from ._out import finish
from .attention import _attend, _buffers, _lse_dtype

_LATENT, _GROUP = 512, 128


def mla_decode(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool = True,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `radix_kernels.mla_decode`."""
    page_size = kv_cache.shape[1]
    result, lse = _buffers(q_nope, compute_dtype)
    q = torch.cat((q_nope, q_rope), -1)
    starts = cu_seqlens_q.tolist()
    for row, kv_len in enumerate(kv_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        if begin == end:
            continue
        pages = page_table[row, : -(-kv_len // page_size)].long()
        tokens = unpack_mla_cache(kv_cache[pages].flatten(0, 1)[:kv_len], compute_dtype)[:, None]
        result[begin:end], lse[begin:end] = _attend(
            q[begin:end], tokens, tokens[..., :_LATENT],
            softmax_scale, causal, (-1, -1), 0.0, None, compute_dtype,
        )  # fmt: skip
    result = finish(result, out, q_nope.dtype)
    return (result, _lse_dtype(lse, q_nope)) if return_softmax_lse else result


def unpack_mla_cache(tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[.., 576] of a dtype from a cache in either form."""
    if tokens.dtype != torch.uint8:
        return tokens.to(dtype)
    latent = tokens[..., :_LATENT].contiguous().view(torch.float8_e4m3fn).to(dtype)
    scales = tokens[..., _LATENT : _LATENT + 16].contiguous().view(torch.float32).to(dtype)
    rope = tokens[..., _LATENT + 16 :].contiguous().view(torch.bfloat16).to(dtype)
    return torch.cat((latent * scales.repeat_interleave(_GROUP, -1), rope), -1)
