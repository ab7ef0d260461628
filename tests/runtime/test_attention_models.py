"""The attention of models with soft caps, windows and sinks against transformers' own, over the
paged cache. The layers are random and small."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, GptOssConfig
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from radix_runtime.attention.base import AttentionSpec
from radix_runtime.attention.registry import create_attention_backend
from radix_runtime.batch import ForwardBatch
from tests.runtime.test_attention_backends import CONFIG, CPU, loaded_batch

torch.set_num_threads(1)
HEADS = 4
KV_HEADS = 2
DIM = 32
WINDOW = 16
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
LENGTHS = [(1, 40), (1, 90), (33, 33), (20, 70)]  # query and KV tokens of each row


def gemma2(layer: int) -> tuple[Any, Any]:
    """Attention and its eager function; the soft cap and the scale are not the defaults."""
    config = Gemma2Config(**SIZES, attn_logit_softcapping=50.0, query_pre_attn_scalar=10)
    return modeling_gemma2.Gemma2Attention(config, layer), modeling_gemma2.eager_attention_forward


def gpt_oss(layer: int) -> tuple[Any, Any]:
    attention = modeling_gpt_oss.GptOssAttention(GptOssConfig(**SIZES), layer)
    attention.sinks.data = torch.randn(HEADS) * 3
    return attention, modeling_gpt_oss.eager_attention_forward


def row_tokens(batch: ForwardBatch, entry: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of a row, [1, KV_HEADS, tokens, DIM], read from its pages."""
    size = batch.kv_pool.page_size
    length = int(batch.kv_lens[entry])
    slots = [(batch.page_table[entry, t // size], t % size) for t in range(length)]
    k, v = (
        torch.stack([cache[page, offset] for page, offset in slots]).transpose(0, 1)[None]
        for cache in (batch.kv_pool.k[1], batch.kv_pool.v[1])
    )
    return k, v


def causal_mask(query: int, kv: int, window: int | None) -> torch.Tensor:
    position = torch.arange(kv)
    last = position[kv - query :, None]
    hidden = position > last
    if window is not None:
        hidden |= position <= last - window
    return torch.zeros(query, kv).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]


@torch.no_grad()
def check(family: Any, layer: int, backend_name: str, page_size: int, amplitude: float) -> None:
    torch.manual_seed(layer)
    attention, eager = family(layer)
    attention.eval()
    window = attention.sliding_window
    softcap = getattr(attention, "attn_logit_softcapping", None)
    sinks = getattr(attention, "sinks", None)
    assert (window == WINDOW) == (layer == 0)
    spec = AttentionSpec(
        layer_id=1,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        scale=attention.scaling,
        window=window,
        softcap=softcap,
        sinks=None if sinks is None else sinks.data,
    )
    batch = loaded_batch(LENGTHS, page_size, KV_HEADS, DIM, torch.float32)
    q = torch.randn(batch.num_tokens, HEADS, DIM) * amplitude
    backend = create_attention_backend(backend_name, CONFIG, CPU, torch.float32, page_size)
    backend.plan(batch)
    found = backend.forward(spec, q, batch, torch.full_like(q, float("nan")))
    start = 0
    for entry, (query, kv) in enumerate(LENGTHS):
        k, v = row_tokens(batch, entry)
        rows = q[start : start + query].transpose(0, 1)[None]
        expected, _ = eager(
            attention, rows, k, v, causal_mask(query, kv, window),
            scaling=attention.scaling, softcap=softcap,
        )  # fmt: skip
        error = (found[start : start + query] - expected[0]).norm() / expected.norm()
        assert error < 2e-6, f"row {entry}: {error}"
        start += query


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layer", [0, 1], ids=["window", "full"])
@pytest.mark.parametrize("name", ["paged", "torch_native"])
def test_gemma2(name: str, layer: int, page_size: int) -> None:
    """Scores reach far beyond the cap of 50."""
    check(gemma2, layer, name, page_size, amplitude=20.0)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layer", [0, 1], ids=["window", "full"])
@pytest.mark.parametrize("name", ["paged", "torch_native"])
def test_gpt_oss(name: str, layer: int, page_size: int) -> None:
    check(gpt_oss, layer, name, page_size, amplitude=1.0)
