"""Norms, RoPE, gated activations, and what stands between the QKV projection and attention: widths
of real models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

import radix_kernels as rk

from .. import peers
from ..harness import ROTATED_BYTES, Case, Contender, randn

# (tokens, hidden) of the norms, (tokens, intermediate) of the activations
NORMS = {
    "cpu": ((1, 1024), (32, 1024), (512, 1024), (1, 4096), (32, 4096), (512, 4096)),
    "cuda": (
        (1, 1024),
        (64, 1024),
        (4096, 1024),
        (1, 4096),
        (64, 4096),
        (4096, 4096),
        (16384, 8192),
    ),
}
ACTIVATIONS = {
    "cpu": ((1, 3072), (32, 3072), (512, 3072), (1, 14336), (32, 14336), (512, 14336)),
    "cuda": (
        (1, 3072),
        (64, 3072),
        (1, 14336),
        (64, 14336),
        (4096, 4096),
        (4096, 8192),
        (4096, 14336),
    ),
}
TOKENS = {"cpu": (1, 32, 512), "cuda": (1, 64, 4096)}
HEAD_DIM = 128
# model -> query heads, KV heads, whether q and k are normalised
HEADS = {"qwen3-0.6b": (16, 8, True), "llama3-8b": (32, 8, False), "qwen3-8b": (32, 8, True)}


def pointwise(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Norms, activations, RoPE, KV stores, and the fused op between QKV and attention."""
    for tokens, hidden in NORMS[device.type]:
        yield _rmsnorm(device, dtype, tokens, hidden)
        yield _fused_add_rmsnorm(device, dtype, tokens, hidden)
        if device.type == "cpu":  # on a GPU torch's operations run it
            yield _layernorm(device, dtype, tokens, hidden)
    for tokens, inter in ACTIVATIONS[device.type]:
        yield _silu_and_mul(device, dtype, tokens, inter)
    for model, (heads, kv_heads, norm) in HEADS.items():
        for tokens in TOKENS[device.type]:
            if model != "qwen3-8b":
                yield _rope(device, dtype, tokens, heads, kv_heads)
            yield _between(device, dtype, tokens, model, heads, kv_heads, norm)
    for tokens in TOKENS[device.type]:
        yield _store(device, dtype, tokens, 8, dtype)
        if device.type == "cuda":  # on the CPU the reference runs it
            yield _store(device, dtype, tokens, 8, torch.float8_e4m3fn)


def _rmsnorm(device: torch.device, dtype: torch.dtype, tokens: int, hidden: int) -> Case:
    weight = torch.randn(hidden, device=device, dtype=dtype)

    def make() -> tuple[torch.Tensor, ...]:
        x = randn(tokens, hidden, device=device, dtype=dtype)
        return x, torch.zeros_like(x)

    contenders: dict[str, Contender] = {
        "radix": lambda x, out: rk.rmsnorm(x, weight, 1e-6, out=out),
        "torch": lambda x, out: F.rms_norm(x, (hidden,), weight, 1e-6),
    }
    if flashinfer := peers.load("flashinfer"):
        contenders["flashinfer"] = lambda x, out: flashinfer.norm.rmsnorm(x, weight, 1e-6, out=out)
    if vllm := peers.load("vllm._custom_ops"):
        contenders["vllm"] = lambda x, out: vllm.rms_norm(out, x, weight, 1e-6)
    size = tokens * hidden * dtype.itemsize
    return Case(
        op="rmsnorm",
        shape=f"{tokens}x{hidden}",
        dtype=dtype,
        bytes=2 * size,
        flops=4 * tokens * hidden,
        make_inputs=make,
        contenders=contenders,
    )


def _fused_add_rmsnorm(device: torch.device, dtype: torch.dtype, tokens: int, hidden: int) -> Case:
    weight = torch.randn(hidden, device=device, dtype=dtype)

    def make() -> tuple[torch.Tensor, ...]:
        return tuple(randn(tokens, hidden, device=device, dtype=dtype) for _ in range(2))

    def eager(x: torch.Tensor, residual: torch.Tensor) -> None:
        residual.add_(x)
        x.copy_(F.rms_norm(residual, (hidden,), weight, 1e-6))

    contenders: dict[str, Contender] = {
        "radix": lambda x, residual: rk.fused_add_rmsnorm(x, residual, weight, 1e-6),
        "torch": eager,
    }
    if flashinfer := peers.load("flashinfer"):
        contenders["flashinfer"] = lambda x, r: flashinfer.norm.fused_add_rmsnorm(
            x, r, weight, 1e-6
        )
    if vllm := peers.load("vllm._custom_ops"):
        contenders["vllm"] = lambda x, r: vllm.fused_add_rms_norm(x, r, weight, 1e-6)
    size = tokens * hidden * dtype.itemsize
    return Case(
        op="fused_add_rmsnorm",
        shape=f"{tokens}x{hidden}",
        dtype=dtype,
        bytes=4 * size,
        flops=5 * tokens * hidden,
        make_inputs=make,
        contenders=contenders,
    )


def _layernorm(device: torch.device, dtype: torch.dtype, tokens: int, hidden: int) -> Case:
    weight, bias = (torch.randn(hidden, device=device, dtype=dtype) for _ in range(2))

    def make() -> tuple[torch.Tensor, ...]:
        x = randn(tokens, hidden, device=device, dtype=dtype)
        return x, torch.zeros_like(x)

    contenders: dict[str, Contender] = {
        "radix": lambda x, out: rk.layernorm(x, weight, bias, 1e-5, out=out),
        "torch": lambda x, out: F.layer_norm(x, (hidden,), weight, bias, 1e-5),
    }
    size = tokens * hidden * dtype.itemsize
    return Case(
        op="layernorm",
        shape=f"{tokens}x{hidden}",
        dtype=dtype,
        bytes=2 * size,
        flops=8 * tokens * hidden,
        make_inputs=make,
        contenders=contenders,
    )


def _silu_and_mul(device: torch.device, dtype: torch.dtype, tokens: int, inter: int) -> Case:
    def make() -> tuple[torch.Tensor, ...]:
        x = randn(tokens, 2 * inter, device=device, dtype=dtype)
        return x, torch.zeros(tokens, inter, device=device, dtype=dtype)

    def eager(x: torch.Tensor, out: torch.Tensor) -> None:
        gate, up = x.chunk(2, dim=-1)
        torch.mul(F.silu(gate), up, out=out)

    contenders: dict[str, Contender] = {
        "radix": lambda x, out: rk.silu_and_mul(x, out=out),
        "torch": eager,
    }
    if flashinfer := peers.load("flashinfer"):
        contenders["flashinfer"] = lambda x, out: flashinfer.activation.silu_and_mul(x, out=out)
    if peers.load("vllm._custom_ops"):
        contenders["vllm"] = lambda x, out: torch.ops._C.silu_and_mul(out, x)
    size = 3 * tokens * inter
    return Case(
        op="silu_and_mul",
        shape=f"{tokens}x{inter}",
        dtype=dtype,
        bytes=size * dtype.itemsize,
        flops=5 * tokens * inter,
        make_inputs=make,
        contenders=contenders,
    )


def _rotate(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor) -> None:
    c, s = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    for x in (q, k):
        a, b = x.float().chunk(2, dim=-1)
        x.copy_(torch.cat((a * c - b * s, b * c + a * s), dim=-1))


def _rope(device: torch.device, dtype: torch.dtype, tokens: int, heads: int, kv_heads: int) -> Case:
    table = rk.rope_cos_sin_cache(HEAD_DIM, 8192, 1e6).to(device)

    def make() -> tuple[torch.Tensor, ...]:
        positions = torch.randint(0, 8192, (tokens,), device=device)
        q, k = (randn(tokens, h, HEAD_DIM, device=device, dtype=dtype) for h in (heads, kv_heads))
        return positions, q, k

    contenders: dict[str, Contender] = {
        "radix": lambda positions, q, k: rk.apply_rope_inplace(positions, q, k, HEAD_DIM, table),
        "torch": lambda positions, q, k: _rotate(q, k, table[positions]),
    }
    if flashinfer := peers.load("flashinfer"):
        contenders["flashinfer"] = lambda positions, q, k: (
            flashinfer.rope.apply_rope_with_cos_sin_cache_inplace(
                positions, q.flatten(1), k.flatten(1), HEAD_DIM, table
            )
        )
    if peers.load("vllm._custom_ops"):
        narrow = table.to(dtype)
        contenders["vllm"] = lambda positions, q, k: torch.ops._C.rotary_embedding(
            positions, q, k, HEAD_DIM, narrow, True
        )
    size = tokens * (heads + kv_heads) * HEAD_DIM
    shape = f"{tokens}x({heads}+{kv_heads})x{HEAD_DIM}"
    return Case(
        op="apply_rope_inplace",
        shape=shape,
        dtype=dtype,
        bytes=2 * size * dtype.itemsize,
        flops=3 * size,
        make_inputs=make,
        contenders=contenders,
    )


def _large_cache(
    device: torch.device, dtype: torch.dtype, tokens: int, heads: int
) -> tuple[torch.Tensor, torch.Tensor, Callable[[], torch.Tensor]]:
    """K and V pages, more than the machine's caches hold, and what gives each input set slots of
    its own in them."""
    page_size = 16
    pages = (
        max(ROTATED_BYTES // (2 * heads * HEAD_DIM * dtype.itemsize), 2 * tokens) // page_size + 1
    )
    free = torch.randperm(pages * page_size, device=device)
    turn = itertools.count()
    k_cache, v_cache = (
        torch.zeros(pages, page_size, heads, HEAD_DIM, device=device, dtype=dtype) for _ in range(2)
    )

    def next_slots() -> torch.Tensor:
        return free[(next(turn) * tokens + torch.arange(tokens, device=device)) % len(free)]

    return k_cache, v_cache, next_slots


def _between(
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    model: str,
    heads: int,
    kv_heads: int,
    norm: bool,
) -> Case:
    """q/k norm, RoPE and KV store: one op against our own single ops and against torch."""
    table = rk.rope_cos_sin_cache(HEAD_DIM, 8192, 1e6).to(device)
    weight = torch.randn(HEAD_DIM, device=device, dtype=dtype) if norm else None
    k_cache, v_cache, next_slots = _large_cache(device, dtype, tokens, kv_heads)

    def make() -> tuple[torch.Tensor, ...]:
        qkv = randn(tokens, heads + 2 * kv_heads, HEAD_DIM, device=device, dtype=dtype)
        slots = next_slots()
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
        positions = torch.randint(0, 8192, (tokens,), device=device)
        return q, k, v, positions, slots

    def ours(q: Any, k: Any, v: Any, positions: Any, slots: Any) -> None:
        rk.fused_qk_norm_rope_store(
            q, k, v, weight, weight, table, positions, k_cache, v_cache, slots
        )

    def separate(q: Any, k: Any, v: Any, positions: Any, slots: Any) -> None:
        if weight is not None:
            q = rk.rmsnorm(q, weight)
            k = rk.rmsnorm(k, weight)
        rk.apply_rope_inplace(positions, q, k, HEAD_DIM, table)
        rk.store_kv_cache(k, v, k_cache, v_cache, slots)

    def eager(q: Any, k: Any, v: Any, positions: Any, slots: Any) -> None:
        if weight is not None:
            q, k = (F.rms_norm(x, (HEAD_DIM,), weight, 1e-6) for x in (q, k))
        _rotate(q, k, table[positions])
        for cache, x in ((k_cache, k), (v_cache, v)):
            cache.view(-1, kv_heads, HEAD_DIM)[slots] = x

    contenders: dict[str, Contender] = {"radix": ours, "separate": separate, "torch": eager}
    size = tokens * (heads + 2 * kv_heads) * HEAD_DIM
    return Case(
        op="fused_qk_norm_rope_store",
        shape=f"{tokens} tokens of {model}",
        dtype=dtype,
        bytes=2 * size * dtype.itemsize,
        flops=6 * size,
        make_inputs=make,
        contenders=contenders,
    )


def _store(
    device: torch.device, dtype: torch.dtype, tokens: int, heads: int, cache_dtype: torch.dtype
) -> Case:
    fp8 = cache_dtype != dtype
    k_cache, v_cache, next_slots = _large_cache(device, cache_dtype, tokens, heads)
    scale = torch.full((1,), 0.02, device=device)
    scales = {"k_scale": scale, "v_scale": scale} if fp8 else {}

    def make() -> tuple[torch.Tensor, ...]:
        k, v = (randn(tokens, heads, HEAD_DIM, device=device, dtype=dtype) for _ in range(2))
        return k, v, next_slots()

    def eager(k: Any, v: Any, slots: Any) -> None:
        for cache, x in ((k_cache, k), (v_cache, v)):
            x = (x / scale).clamp(-448, 448).to(cache_dtype).view(torch.uint8) if fp8 else x
            cache.view(x.dtype).view(-1, heads, HEAD_DIM)[slots] = x

    contenders: dict[str, Contender] = {
        "radix": lambda k, v, slots: rk.store_kv_cache(k, v, k_cache, v_cache, slots, **scales),
        "torch": eager,
    }
    if vllm := peers.load("vllm._custom_ops"):
        how = "fp8" if fp8 else "auto"
        caches = [x.view(torch.uint8) if fp8 else x for x in (k_cache, v_cache)]
        contenders["vllm"] = lambda k, v, slots: vllm.reshape_and_cache_flash(
            k, v, *caches, slots, how, scale, scale
        )
    size = 2 * tokens * heads * HEAD_DIM
    moved = size * (dtype.itemsize + cache_dtype.itemsize)
    name = f"{tokens}x{heads}x{HEAD_DIM}{' FP8' if fp8 else ''}"
    return Case(
        op="store_kv_cache",
        shape=name,
        dtype=dtype,
        bytes=moved,
        flops=2 * size,
        make_inputs=make,
        contenders=contenders,
    )
