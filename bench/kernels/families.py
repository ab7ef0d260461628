"""The cases of each family: shapes of real models, our op, and what torch offers for the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

import radix_kernels as rk

from .harness import Case

# hidden, q heads, kv heads, head dim, intermediate
QWEN3_06B = (1024, 16, 8, 128, 3072)
LLAMA3_8B = (4096, 32, 8, 128, 14336)

TOKENS = {"cpu": (1, 32, 512), "cuda": (1, 64, 4096)}


def norm(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for hidden in (1024, 4096):
        weight = torch.randn(hidden, device=device, dtype=dtype)
        for tokens in TOKENS[device.type]:
            size = tokens * hidden * dtype.itemsize

            def one(tokens: int = tokens, hidden: int = hidden) -> tuple[torch.Tensor, ...]:
                return (torch.randn(tokens, hidden, device=device, dtype=dtype),)

            def two(tokens: int = tokens, hidden: int = hidden) -> tuple[torch.Tensor, ...]:
                shape = (tokens, hidden)
                return tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(2))

            def torch_fused(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor = weight) -> None:
                r.add_(x)
                x.copy_(F.rms_norm(r, (r.shape[-1],), w, 1e-6))

            yield Case(
                "rmsnorm", f"{tokens}x{hidden}", dtype, 2 * size, 4 * tokens * hidden, one,
                {
                    "radix": lambda x, w=weight: rk.rmsnorm(x, w, 1e-6),
                    "torch": lambda x, w=weight: F.rms_norm(x, (x.shape[-1],), w, 1e-6),
                },
            )  # fmt: skip
            yield Case(
                "fused_add_rmsnorm", f"{tokens}x{hidden}", dtype, 4 * size, 5 * tokens * hidden,
                two,
                {
                    "radix": lambda x, r, w=weight: rk.fused_add_rmsnorm(x, r, w, 1e-6),
                    "torch": torch_fused,
                },
            )  # fmt: skip


def activation(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for inter in (3072, 14336):
        for tokens in TOKENS[device.type]:

            def make(tokens: int = tokens, inter: int = inter) -> tuple[torch.Tensor]:
                return (torch.randn(tokens, 2 * inter, device=device, dtype=dtype),)

            def eager(x: torch.Tensor) -> torch.Tensor:
                gate, up = x.chunk(2, dim=-1)
                return F.silu(gate) * up

            yield Case(
                "silu_and_mul", f"{tokens}x{inter}", dtype,
                3 * tokens * inter * dtype.itemsize, 5 * tokens * inter, make,
                {"radix": rk.silu_and_mul, "torch": eager},
            )  # fmt: skip


def rope(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    cache = rk.rope_cos_sin_cache(128, 8192, 1e6).to(device)
    cos, sin = cache.chunk(2, dim=-1)
    for hq, hkv in ((16, 8), (32, 8)):
        for tokens in TOKENS[device.type]:

            def make(t: int = tokens, hq: int = hq, hkv: int = hkv) -> tuple[torch.Tensor, ...]:
                positions = torch.randint(0, 8192, (t,), device=device)
                q, k = (torch.randn(t, h, 128, device=device, dtype=dtype) for h in (hq, hkv))
                return positions, q, k

            def ours(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> None:
                rk.apply_rope_inplace(positions, q, k, 128, cache)

            def eager(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> None:
                c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
                for x in (q, k):
                    a, b = x.float().chunk(2, dim=-1)
                    x.copy_(torch.cat((a * c - b * s, b * c + a * s), dim=-1))

            size = tokens * (hq + hkv) * 128
            yield Case(
                "apply_rope_inplace", f"{tokens}x({hq}+{hkv})x128", dtype,
                2 * size * dtype.itemsize, 3 * size, make, {"radix": ours, "torch": eager},
            )  # fmt: skip


def linear(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for n, k in ((4096, 1024), (1024, 3072), (6144, 1024), (1024, 2048)):
        for m in TOKENS[device.type]:

            def make(m: int = m, n: int = n, k: int = k) -> tuple[object, ...]:
                weight = torch.randn(n, k, device=device, dtype=dtype) / k**0.5
                x = torch.randn(m, k, device=device, dtype=dtype)
                return x, weight, rk.pack_weight(weight)

            yield Case(
                "linear", f"{m}x{n}x{k}", dtype, (n * k + m * (n + k)) * dtype.itemsize,
                2 * m * n * k, make,
                {
                    "radix": lambda x, w, p: rk.linear(x, p),
                    "torch": lambda x, w, p: F.linear(x, w),
                },
            )  # fmt: skip


def attention(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    hq, hkv, d = 16, 8, 128
    decode = ((1, 1024), (1, 8192), (32, 1024)) if device.type == "cpu" else (
        (1, 8192), (64, 4096), (256, 1024))  # fmt: skip
    prefill = (128, 1024) if device.type == "cpu" else (2048, 8192)
    for batch, length in decode:
        yield _attention_case(device, dtype, hq, hkv, d, batch, 1, length)
    for length in prefill:
        yield _attention_case(device, dtype, hq, hkv, d, 1, length, length)


def _attention_case(
    device: torch.device, dtype: torch.dtype, hq: int, hkv: int, d: int, batch: int, new: int,
    length: int, page: int = 16,
) -> Case:  # fmt: skip
    pages = batch * -(-length // page)
    table = torch.arange(pages, dtype=torch.int32, device=device).view(batch, -1)
    kv_lens = torch.full((batch,), length, dtype=torch.int32, device=device)
    cu = torch.arange(0, (batch + 1) * new, new, dtype=torch.int32, device=device)

    def make() -> tuple[torch.Tensor, ...]:
        q = torch.randn(batch * new, hq, d, device=device, dtype=dtype)
        k, v = (torch.randn(pages, page, hkv, d, device=device, dtype=dtype) for _ in range(2))
        return q, k, v

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return rk.flash_attn_with_kvcache(q, k, v, table, kv_lens, cu)

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # The contiguous layout that torch needs: a view here, since pages lie in order.
        k, v = (x.view(batch, length, hkv, d).transpose(1, 2) for x in (k, v))
        q = q.view(batch, new, hq, d).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=new > 1, enable_gqa=True)

    pairs = new * (length - new) + new * (new + 1) / 2
    kv_bytes = 2 * batch * length * hkv * d
    return Case(
        "flash_attn_with_kvcache", f"B{batch} q{new} kv{length} {hq}/{hkv}x{d}", dtype,
        (kv_bytes + 2 * batch * new * hq * d) * dtype.itemsize, 4 * batch * hq * d * pairs,
        make, {"radix": ours, "torch sdpa": sdpa},
    )  # fmt: skip


def sampling(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    vocab = 151936
    for batch in (1, 32) if device.type == "cpu" else (1, 64, 256):
        filters = {"greedy": (0.0, -1, 1.0), "temperature": (1.0, -1, 1.0),
                   "top-k 50 top-p 0.9": (0.7, 50, 0.9)}  # fmt: skip
        for name, (temperature, top_k, top_p) in filters.items():
            yield _sampling_case(device, batch, vocab, name, temperature, top_k, top_p)


def _sampling_case(
    device: torch.device, batch: int, vocab: int, name: str, temperature: float, top_k: int,
    top_p: float,
) -> Case:  # fmt: skip
    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((batch,), value, dtype=dtype, device=device)

    t, p, zero = (full(x, torch.float32) for x in (temperature, top_p, 0.0))
    k = full(top_k, torch.int32)
    seed = torch.arange(batch, device=device)

    def ours(logits: torch.Tensor) -> torch.Tensor:
        return rk.top_k_top_p_sampling(logits, t, k, p, zero, seed, seed)

    def eager(logits: torch.Tensor) -> torch.Tensor:
        if temperature == 0:
            return logits.argmax(-1)
        probs = (logits / temperature).softmax(-1)
        if top_k > 0:
            probs, _ = probs.sort(descending=True)
            probs[:, top_k:] = 0
            probs[probs.cumsum(-1) - probs > top_p] = 0
        return torch.multinomial(probs, 1)

    return Case(
        "top_k_top_p_sampling", f"{batch}x{vocab} {name}", torch.float32, 4.0 * batch * vocab,
        3.0 * batch * vocab, lambda: (torch.randn(batch, vocab, device=device),),
        {"radix": ours, "torch": eager},
    )  # fmt: skip


FAMILIES: dict[str, Callable[[torch.device, torch.dtype], Iterator[Case]]] = {
    "norm": norm,
    "rope": rope,
    "activation": activation,
    "linear": linear,
    "attention": attention,
    "sampling": sampling,
}
