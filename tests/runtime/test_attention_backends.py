"""Every attention backend against a float64 oracle over the pages themselves."""

from __future__ import annotations

import importlib.util
import os
import itertools
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from radix_runtime import ops
from radix_runtime.attention import registry
from radix_runtime.attention.base import AttentionBackend, AttentionSpec
from radix_runtime.attention.radix import RadixAttention, TritonAttention
from radix_runtime.attention.registry import create_attention_backend
from radix_runtime.attention.torch_native import TorchNativeAttention
from radix_runtime.batch import ForwardBatch
from radix_runtime.device import Device
from radix_runtime.errors import ConfigError
from radix_runtime.memory.kv_pool import KVPool
from radix_runtime.model_config import ModelConfig
from radix_runtime.registry import Registry
from radix_runtime.step_plan import StepPlan

torch.set_num_threads(1)
CPU = Device.resolve("cpu")
CONFIG = ModelConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": 256,
    }
)
# (query tokens, kv tokens) of each entry: decode rows first; one, odd and page-sized lengths
STEPS = {
    "decode": [(1, 1), (1, 17), (1, 100)],
    "prefill": [(5, 5), (1, 64), (33, 64), (20, 83)],
    "mixed": [(1, 30), (1, 65), (16, 16), (7, 71)],
}


def loaded_batch(
    lengths: list[tuple[int, int]], page_size: int, heads: int, dim: int, dtype: torch.dtype
) -> ForwardBatch:
    """A batch over random pages; every slot that belongs to no row is NaN."""
    pool = KVPool(
        num_layers=2,
        num_pages=400,
        page_size=page_size,
        num_kv_heads=heads,
        head_dim=dim,
        dtype=dtype,
        device=CPU,
    )
    batch = ForwardBatch(CPU, pool, max_tokens=200, max_batch=8, max_rows=8, max_context=128)
    free = random.Random(7).sample(range(400), 400)
    deltas = []
    for row, (_, kv) in enumerate(lengths):
        deltas += [(row, i, free.pop()) for i in range(-(-kv // page_size))]
    query = np.array([q for q, _ in lengths], np.int32)
    columns = np.array(deltas, np.int32).T
    num_decode = len(list(itertools.takewhile(lambda entry: entry[0] == 1, lengths)))
    plan = StepPlan(
        step_id=0,
        num_decode=num_decode,
        rows=np.arange(len(lengths), dtype=np.int32),
        query_len=query,
        kv_len=np.array([kv for _, kv in lengths], np.int32),
        num_samples=np.ones(len(lengths), np.int32),
        input_ids=np.zeros(query[num_decode:].sum(), np.int32),
        page_rows=columns[0],
        page_index=columns[1],
        page_ids=columns[2],
    )
    committed = torch.zeros(9, dtype=torch.int32)
    committed[: len(lengths)] = torch.from_numpy(plan.kv_len - query)
    batch.load(plan, torch.zeros((9, 1), dtype=torch.int32), committed)
    generator = torch.Generator().manual_seed(3)
    for cache in (*pool.k, *pool.v):
        cache.fill_(float("nan"))
        for row, (_, kv) in enumerate(lengths):
            for t in range(kv):
                page = int(batch.page_table[row, t // page_size])
                value = torch.randn(heads, dim, generator=generator)
                cache[page, t % page_size] = value.to(dtype)
    return batch


def oracle(q: torch.Tensor, batch: ForwardBatch, spec: AttentionSpec) -> torch.Tensor:
    """float64, token by token, head by head."""
    pool, out, token = batch.kv_pool, torch.zeros(q.shape, dtype=torch.float64), 0
    lengths = zip(batch.query_lens_host, batch.kv_lens.tolist(), strict=True)
    for entry, (count, kv) in enumerate(lengths):
        slots = [
            (batch.page_table[entry, t // pool.page_size], t % pool.page_size) for t in range(kv)
        ]
        for position in range(kv - count, kv):
            first = 0 if spec.window is None else max(0, position - spec.window + 1)
            seen = slots[first : position + 1]
            for head in range(spec.num_heads):
                group = head * spec.num_kv_heads // spec.num_heads
                k = torch.stack([pool.k[spec.layer_id][p, s, group] for p, s in seen]).double()
                v = torch.stack([pool.v[spec.layer_id][p, s, group] for p, s in seen]).double()
                weights = (k @ q[token, head].double() * spec.scale).softmax(0)
                out[token, head] = weights @ v
            token += 1
    return out


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("window", [None, 1, 9, 200])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["radix", "torch_native"])
def test_equals_the_oracle(name: str, step: str, window: int | None, page_size: int) -> None:
    for heads, kv_heads, dtype, tolerance in (
        (4, 2, torch.float32, 1e-5),
        (3, 1, torch.bfloat16, 1e-2),
    ):
        batch = loaded_batch(STEPS[step], page_size, kv_heads, 32, dtype)
        spec = AttentionSpec(1, heads, kv_heads, 32, 0.3, window)
        backend = create_attention_backend(name, CONFIG, CPU, dtype, page_size)
        backend.plan(batch)
        # q as the model gives it: a slice of a wider tensor
        q = torch.randn(batch.num_tokens, heads * 3, 32).to(dtype)[:, heads : 2 * heads]
        out = torch.full((batch.num_tokens, heads, 32), float("nan"), dtype=dtype)
        result = backend.forward(spec, q, batch, out)
        assert result is out
        expected = oracle(q, batch, spec)
        error = (out.double() - expected).norm() / expected.norm()
        assert error < tolerance, f"{heads}/{kv_heads} heads, {dtype}"


def test_radix_splits_a_mixed_batch_on_a_gpu() -> None:
    """Decode rows and prompt chunks go to kernels of their own; together they are the whole
    batch."""
    device = SimpleNamespace(is_cpu=False)
    for lengths, calls in (
        (STEPS["decode"], [1]),
        ([(5, 5), (33, 64)], [33]),
        (STEPS["mixed"], [1, 16]),
    ):
        batch = loaded_batch(lengths, 16, 2, 32, torch.float32)
        spec = AttentionSpec(1, 4, 2, 32, 0.3, 9)
        backend = RadixAttention(CONFIG, device)  # type: ignore[arg-type]
        backend.plan(batch)
        q = torch.randn(batch.num_tokens, 4, 32)
        out = torch.full_like(q, float("nan"))
        with mock.patch.object(
            ops, "flash_attn_with_kvcache", wraps=ops.flash_attn_with_kvcache
        ) as attention:
            backend.forward(spec, q, batch, out)
        assert [c.kwargs["max_seqlen_q"] for c in attention.mock_calls] == calls
        expected = oracle(q, batch, spec)
        assert (out.double() - expected).norm() / expected.norm() < 1e-5


def check_triton(step: str, window: int | None) -> None:
    device = Device.resolve("auto")
    batch = loaded_batch(STEPS[step], 16, 2, 32, torch.float32)
    spec = AttentionSpec(1, 4, 2, 32, 0.3, window)
    q = torch.randn(batch.num_tokens, 4, 32)
    expected = oracle(q, batch, spec)
    batch.kv_pool.k = [k.to(device.torch_device) for k in batch.kv_pool.k]
    batch.kv_pool.v = [v.to(device.torch_device) for v in batch.kv_pool.v]
    for name in ("page_table", "kv_lens", "cu_seqlens_q"):
        setattr(batch, name, getattr(batch, name).to(device.torch_device))
    backend = TritonAttention(CONFIG, device)
    backend.plan(batch)
    q = q.to(device.torch_device)
    out = backend.forward(spec, q, batch, torch.full_like(q, float("nan")))
    error = (out.cpu().double() - expected).norm() / expected.norm()
    assert error < 1e-5, f"{step}, window {window}: {error}"


def test_triton_equals_the_oracle() -> None:
    """On a GPU, else in Triton's interpreter, which must be chosen before Triton is imported."""
    if importlib.util.find_spec("triton") is None:
        assert "triton" not in os.environ.get("REQUIRE", ""), "triton is required but not installed"
        pytest.skip("triton is not installed")
    code = (
        "from tests.runtime.test_attention_backends import STEPS, check_triton\n"
        "for step in STEPS:\n"
        "    for window in (None, 9):\n"
        "        check_triton(step, window)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if not torch.cuda.is_available():
        env["TRITON_INTERPRET"] = "1"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_the_default_is_radix() -> None:
    backend = create_attention_backend(None, CONFIG, CPU, torch.bfloat16, 16)
    assert type(backend).__name__ == "RadixAttention"


def test_triton_is_not_for_the_cpu() -> None:
    with pytest.raises(ConfigError, match="attention backend triton does not support Llama.* cpu"):
        create_attention_backend("triton", CONFIG, CPU, torch.bfloat16, 16)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="'fast' is unknown; there are: radix, triton, torch_na"):
        create_attention_backend("fast", CONFIG, CPU, torch.bfloat16, 16)


class FakeEntryPoint:
    name = "mine"

    def load(self) -> type[AttentionBackend]:
        class Mine(TorchNativeAttention):
            pass

        return Mine


def test_a_backend_from_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(*, group: str, name: str = "mine") -> list[Any]:
        known = group == "radix.attention_backends" and name == "mine"
        return [FakeEntryPoint()] if known else []

    fresh: Registry[type[AttentionBackend]] = Registry(
        "attention backend", "radix.attention_backends", {}
    )
    monkeypatch.setattr(registry, "attention_backends", fresh)
    monkeypatch.setattr("radix_runtime.registry.entry_points", entry_points)
    backend = create_attention_backend("mine", CONFIG, CPU, torch.float32, 16)
    assert isinstance(backend, TorchNativeAttention)
    assert fresh.names()[0] == "mine"
    with pytest.raises(ConfigError, match="unknown; there are: mine"):
        create_attention_backend("other", CONFIG, CPU, torch.float32, 16)


def test_our_own_names_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(*, group: str, name: str = "mine") -> list[Any]:
        return [FakeEntryPoint()]

    monkeypatch.setattr("radix_runtime.registry.entry_points", entry_points)
    fresh: Registry[Any] = Registry("thing", "radix.things", {"mine": 1})
    assert fresh.get("mine") == 1


@pytest.mark.parametrize("version", ["0.1.0", "0.1.9", "0.1.0rc1", "0.1.0+cpu"])
def test_wheel_versions_that_serve(version: str) -> None:
    ops.check_version(version)


@pytest.mark.parametrize("version", ["0.0.9", "0.2.0", "1.0", "", "unknown"])
def test_wheel_versions_that_do_not(version: str) -> None:
    with pytest.raises(ConfigError, match="this runtime needs >=0.1,<0.2; run: pip install"):
        ops.check_version(version)
