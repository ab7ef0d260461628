"""Multi-head latent attention, absorbed form, one row at a time."""

from __future__ import annotations

import torch

from ._out import finish
from .attention import _attend, _buffers, _lse_dtype
from .kv_cache import store_kv_cache

_LATENT = 512  # values of a token in the FP8 form
_GROUP = 128  # of them share a scale


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
        begin = starts[row]
        end = starts[row + 1]
        if begin == end:
            continue
        pages = page_table[row, : -(-kv_len // page_size)].long()
        tokens = unpack_mla_cache(kv_cache[pages].flatten(0, 1)[:kv_len], compute_dtype)[:, None]
        result[begin:end], lse[begin:end] = _attend(
            q[begin:end], tokens, tokens[..., : q_nope.shape[-1]],
            softmax_scale, causal, (-1, -1), 0.0, None, compute_dtype,
        )  # fmt: skip
    result = finish(result, out, q_nope.dtype)
    return (result, _lse_dtype(lse, q_nope)) if return_softmax_lse else result


def store_mla_kv(
    latent: torch.Tensor, rope: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """See `radix_kernels.store_mla_kv`. The FP8 form is defined in float32."""
    if kv_cache.dtype == torch.uint8:
        tokens = pack_mla_tokens(latent, rope)
    else:
        tokens = torch.cat((latent, rope), -1)
    store_kv_cache(
        tokens[:, None],
        tokens[:, None, :0],
        kv_cache[:, :, None],
        kv_cache[:, :, None, :0],
        slot_mapping,
    )


def gather_mla_kv(
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    *,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `radix_kernels.gather_mla_kv`. The FP8 form is defined in float32."""
    page_size = kv_cache.shape[1]
    ends = cu_seqlens.tolist()
    firsts = [0] * (len(ends) - 1) if starts is None else starts.tolist()
    for row, first in enumerate(firsts):
        begin = ends[row]
        end = ends[row + 1]
        at = torch.arange(first, first + end - begin, device=out.device)
        tokens = kv_cache[page_table[row, at // page_size].long(), at % page_size]
        if kv_cache.dtype == torch.uint8:
            tokens = unpack_mla_cache(tokens, torch.float32).to(out.dtype)
        out[begin:end] = tokens
    return out


def concat_mla_k(k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor) -> None:
    """See `radix_kernels.concat_mla_k`."""
    k.copy_(torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1)), -1))


def pack_mla_tokens(latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """The FP8 form, uint8 [.., 656], of bfloat16 latent [.., 512] and rope [.., 64]."""
    groups = latent.float().unflatten(-1, (_LATENT // _GROUP, _GROUP))
    largest = groups.abs().amax(-1).clamp_min(1e-10)
    # Divided by a tensor: by a plain number, torch on a GPU multiplies with its inverse.
    scales = largest / torch.full_like(largest, 448)
    values = (groups / scales[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(-2)
    return torch.cat([x.contiguous().view(torch.uint8) for x in (values, scales, rope)], -1)


def unpack_mla_cache(tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[.., 576] of a dtype from a cache in either form."""
    if tokens.dtype != torch.uint8:
        return tokens.to(dtype)
    latent = tokens[..., :_LATENT].contiguous().view(torch.float8_e4m3fn).to(dtype)
    scales = tokens[..., _LATENT : _LATENT + 16].contiguous().view(torch.float32).to(dtype)
    rope = tokens[..., _LATENT + 16 :].contiguous().view(torch.bfloat16).to(dtype)
    return torch.cat((latent * scales.repeat_interleave(_GROUP, -1), rope), -1)
