"""Every attention backend against a float64 oracle over the pages themselves."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from radix_runtime import ops
from radix_runtime.attention import registry
from radix_runtime.attention.base import AttentionBackend, AttentionSpec
from radix_runtime.attention.paged import PagedAttention
from radix_runtime.attention.registry import create_attention_backend
from radix_runtime.attention.torch_native import TorchNativeAttention
from radix_runtime.attention.triton import TritonAttention
from radix_runtime.batch import ForwardBatch
from radix_runtime.device import Device
from radix_runtime.errors import ConfigError
from radix_runtime.model_config import ModelConfig
from radix_runtime.registry import Registry
from tests.runtime.pools import gqa_layout, random_batch

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
SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.05},
    "window": {"window": 3},
    "soft cap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"scale": 0.5, "window": 9, "softcap": 5.0, "sinks": True},
}


def loaded_batch(
    lengths: list[tuple[int, int]], page_size: int, heads: int, dim: int, dtype: torch.dtype
) -> ForwardBatch:
    """A batch over random keys and values."""
    layout = gqa_layout(
        num_layers=2, page_size=page_size, num_kv_heads=heads, head_dim=dim, dtype=dtype
    )
    return random_batch(lengths, layout)


def oracle(q: torch.Tensor, batch: ForwardBatch, spec: AttentionSpec) -> torch.Tensor:
    """float64, token by token, head by head."""
    pool = batch.kv_pool
    out = torch.zeros(q.shape, dtype=torch.float64)
    token = 0
    lengths = zip(batch.cu_seqlens_q.diff().tolist(), batch.kv_lens.tolist(), strict=True)
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
                scores = k @ q[token, head].double() * spec.scale
                if spec.softcap is not None:
                    scores = spec.softcap * (scores / spec.softcap).tanh()
                if spec.sinks is not None:
                    scores = torch.cat([scores, spec.sinks[head : head + 1].double()])
                out[token, head] = scores.softmax(0)[: len(v)] @ v
            token += 1
    return out


def make_spec(num_heads: int, num_kv_heads: int, **options: Any) -> AttentionSpec:
    """Layer 1, heads of 32 elements. `sinks`: True for random ones."""
    if options.get("sinks"):
        generator = torch.Generator().manual_seed(11)
        options["sinks"] = torch.randn(num_heads, generator=generator) * 3
    return AttentionSpec(
        layer_id=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=32,
        **{"scale": 0.3, **options},
    )


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("window", [None, 1, 9, 200])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["paged", "torch_native"])
def test_equals_the_oracle(name: str, step: str, window: int | None, page_size: int) -> None:
    for heads, kv_heads, dtype, tolerance in (
        (4, 2, torch.float32, 1e-5),
        (3, 1, torch.bfloat16, 1e-2),
    ):
        batch = loaded_batch(STEPS[step], page_size, kv_heads, 32, dtype)
        spec = make_spec(heads, kv_heads, window=window)
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


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["paged", "torch_native"])
def test_every_field_of_a_spec_counts(name: str, step: str, kind: str) -> None:
    batch = loaded_batch(STEPS[step], 16, 2, 32, torch.float32)
    backend = create_attention_backend(name, CONFIG, CPU, torch.float32, 16)
    backend.plan(batch)
    q = torch.randn(batch.num_tokens, 4, 32) * 4
    spec = make_spec(4, 2, **SPECS[kind])
    expected = oracle(q, batch, spec)
    found = backend.forward(spec, q, batch, torch.full_like(q, float("nan")))
    assert (found.double() - expected).norm() / expected.norm() < 1e-5
    plain = oracle(q, batch, make_spec(4, 2))
    assert kind == "plain" or (plain - expected).norm() / expected.norm() > 1e-2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "4 query heads are no multiple of 3 KV heads"),
        ({"num_kv_heads": 0}, "4 query heads are no multiple of 0 KV heads"),
        ({"scale": 0.0}, "scale is 0.0"),
        ({"scale": float("inf")}, "scale is inf"),
        ({"window": 0}, "window is 0"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"softcap": float("nan")}, "softcap is nan"),
        ({"sinks": torch.zeros(3)}, r"sinks are torch.float32 \[3\], expected float32 \[4\]"),
        ({"sinks": torch.zeros(4).half()}, r"sinks are torch.float16 \[4\]"),
    ],
    ids=str,
)
def test_a_spec_that_no_backend_can_compute(changes: dict[str, Any], message: str) -> None:
    sizes = {"layer_id": 0, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "scale": 0.3}
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**(sizes | changes))


PLAIN_ATTENTION = ops.flash_attn_with_kvcache


def attend_nonempty(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *ints: torch.Tensor, **options: Any
) -> None:
    """As a GPU's kernels take a batch: tokens of no entry and entries without tokens are left
    alone. The CPU's kernel gets the others."""
    table, lens, cu = ints
    used = cu.diff() > 0
    starts = torch.cat([cu[:-1][used], cu[-1:]])
    tokens = slice(int(starts[0]), int(starts[-1]))
    out = options.pop("out")[tokens]
    rows = (table[used], lens[used], starts - starts[0])
    PLAIN_ATTENTION(q[tokens], k, v, *rows, out=out, **options)


def test_paged_splits_a_mixed_batch_on_a_gpu() -> None:
    """Decode rows and prompt chunks go to kernels of their own; together they are the whole
    batch."""
    device = SimpleNamespace(is_cpu=False)
    for lengths, calls in (
        (STEPS["decode"], [1]),
        ([(5, 5), (33, 64)], [33]),
        (STEPS["mixed"], [1, 16]),
    ):
        batch = loaded_batch(lengths, 16, 2, 32, torch.float32)
        spec = make_spec(4, 2, window=9)
        backend = PagedAttention(CONFIG, device)  # type: ignore[arg-type]
        backend.plan(batch)
        q = torch.randn(batch.num_tokens, 4, 32)
        out = torch.full_like(q, float("nan"))
        with mock.patch.object(
            ops, "flash_attn_with_kvcache", side_effect=attend_nonempty
        ) as attention:
            backend.forward(spec, q, batch, out)
        assert [c.kwargs["max_seqlen_q"] for c in attention.mock_calls] == calls
        expected = oracle(q, batch, spec)
        assert (out.double() - expected).norm() / expected.norm() < 1e-5


def check_triton(step: str, window: int | None, kind: str) -> None:
    device = Device.resolve("auto")
    batch = loaded_batch(STEPS[step], 16, 2, 32, torch.float32)
    spec = make_spec(4, 2, **({"window": window} | SPECS[kind]))
    q = torch.randn(batch.num_tokens, 4, 32)
    expected = oracle(q, batch, spec)
    for caches in (batch.kv_pool.k, batch.kv_pool.v):
        for layer, cache in caches.items():
            caches[layer] = cache.to(device.torch_device)
    for name in ("page_table", "kv_lens", "cu_seqlens_q"):
        setattr(batch, name, getattr(batch, name).to(device.torch_device))
    backend = TritonAttention(CONFIG, device)
    backend.plan(batch)
    q = q.to(device.torch_device)
    if spec.sinks is not None:
        spec = replace(spec, sinks=spec.sinks.to(device.torch_device))
    out = backend.forward(spec, q, batch, torch.full_like(q, float("nan")))
    error = (out.cpu().double() - expected).norm() / expected.norm()
    assert error < 1e-5, f"{step}, window {window}, {kind}: {error}"


def check_triton_splits() -> None:
    """Each kernel gets its own entries of a mixed batch and writes no others'; a batch of one kind
    is one call."""
    kernels = importlib.import_module("radix_kernels.triton.attention")
    kernels._SPLIT_KEYS = 64  # so that a context of 71 tokens is split
    decode_rows, chunks = [(1, 30), (1, 65)], [(16, 16), (7, 71)]
    for lengths, expected in (
        (decode_rows, ["split", "join"]),
        (chunks, ["whole"]),
        (decode_rows + chunks, ["split", "join", "whole"]),
    ):
        launches: list[str] = []
        batch = loaded_batch(lengths, 16, 2, 32, torch.float32)
        out = torch.full((batch.num_tokens, 4, 32), float("nan"))
        with (
            mock.patch.object(
                kernels, "attend", Recorded(kernel=kernels.attend, launches=launches, out=out)
            ),
            mock.patch.object(
                kernels, "combine", Recorded(kernel=kernels.combine, launches=launches, out=out)
            ),
        ):
            backend = TritonAttention(CONFIG, Device.resolve("cpu"))
            backend.plan(batch)
            q = torch.randn(batch.num_tokens, 4, 32)
            backend.forward(make_spec(4, 2), q, batch, out)
        assert launches == expected, f"{lengths}: {launches}"
        error = (out.double() - oracle(q, batch, make_spec(4, 2))).norm()
        assert error < 1e-4, f"{lengths}: {error}"


class Recorded:
    """A Triton kernel that notes its launches, and after each which tokens have no result yet."""

    def __init__(self, kernel: Any, launches: list[str], out: torch.Tensor) -> None:
        self.kernel = kernel
        self.launches = launches
        self.out = out

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            before = self.out.isnan().all(-1).all(-1)
            self.kernel[grid](*args, **options)
            written = before & ~self.out.isnan().all(-1).all(-1)
            if options.get("SPLIT"):
                self.launches.append("split")
                assert not written.any(), "partial results are not the batch's"
                return
            joins = "SPLITS_PAD" in options
            self.launches.append("join" if joins else "whole")
            first = 0 if joins else int(before.nonzero()[0])
            last = 2 if joins else len(self.out)
            assert written.nonzero().flatten().tolist() == list(range(first, last)), written

        return launch


def test_triton_equals_the_oracle() -> None:
    run_with_triton(
        "from tests.runtime.test_attention_backends import SPECS, STEPS, check_triton\n"
        "for step in STEPS:\n"
        "    for window in (None, 9):\n"
        "        check_triton(step, window, 'plain')\n"
        "for kind in SPECS:\n"
        "    check_triton('mixed', 9, kind)\n"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts launches of the interpreter")
def test_triton_splits_a_mixed_batch() -> None:
    run_with_triton(
        "from tests.runtime.test_attention_backends import check_triton_splits\n"
        "check_triton_splits()\n"
    )


def run_with_triton(code: str) -> None:
    """On a GPU, else in Triton's interpreter, which must be chosen before Triton is imported."""
    if importlib.util.find_spec("triton") is None:
        assert "triton" not in os.environ.get("REQUIRE", ""), "triton is required but not installed"
        pytest.skip("triton is not installed")
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


@pytest.mark.parametrize("name", [None, "paged", "radix"])
def test_the_default_and_its_names(name: str | None) -> None:
    backend = create_attention_backend(name, CONFIG, CPU, torch.bfloat16, 16)
    assert type(backend) is PagedAttention


def test_triton_is_not_for_the_cpu() -> None:
    with pytest.raises(ConfigError, match="attention backend triton does not support Llama.* cpu"):
        create_attention_backend("triton", CONFIG, CPU, torch.bfloat16, 16)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="'fast' is unknown; there are: paged, triton, torch_na"):
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
        kind="attention backend", group="radix.attention_backends", items={}
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
    fresh: Registry[Any] = Registry(kind="thing", group="radix.things", items={"mine": 1})
    assert fresh.get("mine") == 1


@pytest.mark.parametrize("version", ["0.1.0", "0.1.9", "0.1.0rc1", "0.1.0+cpu"])
def test_wheel_versions_that_serve(version: str) -> None:
    ops.check_version(version)


@pytest.mark.parametrize("version", ["0.0.9", "0.2.0", "1.0", "", "unknown"])
def test_wheel_versions_that_do_not(version: str) -> None:
    with pytest.raises(ConfigError, match="this runtime needs >=0.1,<0.2; run: pip install"):
        ops.check_version(version)
