"""Latent attention of the backends: absorbed and un-absorbed, in one piece and in several."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from radix_runtime.attention import latent
from radix_runtime.attention.base import AttentionBackend, LatentSpec
from radix_runtime.attention.paged import PagedAttention
from radix_runtime.attention.registry import choose_attention_backend
from radix_runtime.attention.torch_native import TorchNativeAttention
from radix_runtime.attention.triton import TritonAttention
from radix_runtime.batch import ForwardBatch
from radix_runtime.device import Device
from radix_runtime.errors import ConfigError
from radix_runtime.memory.kv_layout import KvLayout, KvPart
from radix_runtime.model_config import ModelConfig
from tests.runtime.pools import CPU, random_batch

HEADS = 4
LATENT = 32
ROPE = 16
NOPE = 48
VALUE = 80
SPEC = LatentSpec(layer_id=1, num_heads=HEADS, latent_dim=LATENT, rope_dim=ROPE, scale=0.3)
CONFIG = ModelConfig.from_dict(
    {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": HEADS,
        "vocab_size": 100,
        "max_position_embeddings": 128,
    }
)
# Rows of (query tokens, KV tokens); the first of one query token decode.
STEPS = {
    "decode": [(1, 50), (1, 1), (1, 97)],
    "chunks": [(7, 7), (5, 90), (2, 40), (30, 64), (9, 9)],
    "mixed": [(1, 33), (1, 5), (11, 100), (4, 4), (1, 1)],
}


def layout(page_size: int, dtype: torch.dtype) -> KvLayout:
    part = KvPart(name="latent", shape=(LATENT + ROPE,), dtype=dtype)
    return KvLayout(page_size=page_size, query_dtype=dtype, layers=((part,),) * 2)


def tokens_of(batch: ForwardBatch, entry: int) -> torch.Tensor:
    page_size = batch.kv_pool.page_size
    at = torch.arange(int(batch.kv_lens[entry]))
    pages = batch.page_table[entry, at // page_size].long()
    return batch.kv_pool.latent[1][pages, at % page_size].double()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * SPEC.scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(k) - len(q) + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


class Problem:
    """A batch, queries of both forms, the up-projection, and what must come out in float64."""

    def __init__(self, step: str, *, page_size: int, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(page_size)
        self.batch = random_batch(STEPS[step], layout(page_size, dtype))
        count = self.batch.num_decode_tokens
        chunks = self.batch.num_tokens - count
        self.up = torch.randn(HEADS, NOPE + VALUE, LATENT, dtype=torch.float64) * 0.2
        self.q_latent = torch.randn(count, HEADS, LATENT, dtype=dtype)
        self.q_rope = torch.randn(count, HEADS, ROPE, dtype=dtype)
        self.q = torch.randn(chunks, HEADS, NOPE + ROPE, dtype=dtype)

    def expand(self, latents: torch.Tensor) -> Any:
        heads = torch.einsum("nl,hdl->nhd", latents.double(), self.up)
        return heads.to(latents.dtype).split([NOPE, VALUE], -1)

    def decoded(self) -> torch.Tensor:
        rows = []
        for entry in range(self.batch.num_decode):
            tokens = tokens_of(self.batch, entry)[:, None].expand(-1, HEADS, -1)
            q = torch.cat((self.q_latent[entry], self.q_rope[entry]), -1)[None]
            rows.append(attend(q, tokens, tokens[..., :LATENT]))
        return torch.cat(rows)

    def prefilled(self) -> torch.Tensor:
        rows = []
        start = 0
        for entry in range(self.batch.num_decode, self.batch.batch_size):
            tokens = tokens_of(self.batch, entry)
            k_nope, values = self.expand(tokens[:, :LATENT])
            keys = torch.cat((k_nope, tokens[:, None, LATENT:].expand(-1, HEADS, -1)), -1)
            end = start + int(self.batch.cu_seqlens_q.diff()[entry])
            rows.append(attend(self.q[start:end], keys, values))
            start = end
        return torch.cat(rows)

    def check(self, backend: AttentionBackend, tolerance: float = 1e-5) -> None:
        backend.plan(self.batch)
        if len(self.q_latent):
            out = torch.empty_like(self.q_latent)
            args = (self.q_latent, self.q_rope, self.batch, out)
            assert backend.decode_latents(SPEC, *args) is out
            assert error(out, self.decoded()) < tolerance
        if len(self.q):
            out = self.q.new_empty(len(self.q), HEADS, VALUE)
            assert backend.prefill_latents(SPEC, self.q, self.expand, self.batch, out) is out
            assert error(out, self.prefilled()) < tolerance


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("backend", [PagedAttention, TorchNativeAttention])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_equals_the_oracle(backend: type[AttentionBackend], step: str, page_size: int) -> None:
    Problem(step, page_size=page_size).check(backend(CONFIG, CPU))
    rounded = Problem(step, page_size=page_size, dtype=torch.bfloat16)
    rounded.check(backend(CONFIG, CPU), 0.02)


@pytest.mark.parametrize("max_keys", [1, 8, 33, 64, 1000])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("step", ["chunks", "mixed"])
def test_pieces(max_keys: int, kind: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU cuts what is cached of a long row, and joins; elsewhere rows are whole."""
    problem = Problem(step, page_size=7)
    problem.batch.device = Device(kind, CPU.torch_device)
    monkeypatch.setattr(latent, "_WORKSPACE", max_keys * 2 * HEADS * (NOPE + ROPE + VALUE) * 4)
    problem.check(PagedAttention(CONFIG, CPU))
    built = problem.batch.metadata
    chunks = STEPS[step][problem.batch.num_decode :]
    if kind == "cpu":
        assert all(piece.is_last for piece in built)
        assert len(built) == (1 if max_keys == 1000 else len(built))
        assert sum(piece.num_keys for piece in built) == sum(kv for _, kv in chunks)
    else:
        longest = max(query for query, _ in chunks)
        assert max(piece.num_keys for piece in built) <= max(max_keys, longest)
        assert sum(1 for piece in built if not piece.is_last) == sum(
            -(-(kv - query) // max_keys) for query, kv in chunks if kv > max_keys
        )


def test_a_row_alone_has_the_bits_of_a_row_among_others() -> None:
    whole = Problem("chunks", page_size=16)
    backend = PagedAttention(CONFIG, CPU)
    out = whole.q.new_empty(len(whole.q), HEADS, VALUE)
    backend.prefill_latents(SPEC, whole.q, whole.expand, whole.batch, out)
    whole.batch.metadata = latent.pieces(whole.batch, 1)
    assert len(whole.batch.metadata) == len(STEPS["chunks"])
    again = torch.empty_like(out)
    backend.prefill_latents(SPEC, whole.q, whole.expand, whole.batch, again)
    assert torch.equal(out, again)


def test_backends_without_latent_attention_are_not_chosen() -> None:
    assert choose_attention_backend(None, CONFIG, CPU, torch.float32, 16) == "paged"
    assert not TritonAttention.supports_latents
    with pytest.raises(ConfigError, match="triton does not support DeepseekV3ForCausalLM"):
        choose_attention_backend("triton", CONFIG, CPU, torch.float32, 16)
