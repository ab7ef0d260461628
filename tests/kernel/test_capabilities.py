"""Which implementation runs, and what is said about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import radix_kernels as rk
from radix_kernels import _arrays, _dispatch, _loader
from radix_kernels._ops import OPS
from radix_kernels.capabilities import _by_dtype
from tests.child import IMPORT_PATH

_NATIVE_NAMES = {
    "linear": "linear_packed",
    "linear_silu_and_mul": "linear_packed",
    "embedding": "embedding_packed",
    "top_k_top_p_sampling_with_logprobs": "top_k_top_p_sampling",
    "fused_experts_packed": "PackedExperts",
    "linear_heads": "PackedHeads",
}

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def no_library(monkeypatch):
    """As in a pure source tree."""
    monkeypatch.setattr(_loader, "bind", None)
    monkeypatch.setattr(_loader, "backend", None)
    monkeypatch.setattr(_loader, "reason", "no native library for this test")
    monkeypatch.setattr(_dispatch, "_warned", set())
    before = rk.get_fallback()
    rk.set_fallback("warn")
    yield
    monkeypatch.undo()
    rk.set_fallback(before)


def test_what_multiplies_quantized_weights(no_library, monkeypatch):
    kinds = ("int8", "int4", "mxfp4")
    monkeypatch.setattr(_dispatch, "triton_installed", lambda: True)
    for device in ("cuda", "rocm"):
        assert {rk.weight_kernel(kind, device)[0] for kind in kinds} == {"triton"}
        impl, why = rk.weight_kernel("w8a8", device)
        assert impl == "none" and "int8, int4, mxfp4" in why
        op = next(op for op in OPS if op.name == "fused_experts_packed")
        assert {said["impl"] for said in _by_dtype(op, device).values()} == {"triton"}
        op = next(op for op in OPS if op.name == "linear")
        assert {said["impl"] for said in _by_dtype(op, device).values()} == {"torch"}
    monkeypatch.setattr(_dispatch, "triton_installed", lambda: False)
    assert {rk.weight_kernel(kind, "cuda")[0] for kind in kinds} == {"reference"}
    assert rk.weight_kernel("int4", "cpu") == ("none", "no native library for this test")
    assert {entry["impl"] for entry in rk.capabilities()["weights"].values()} >= {"none"}
    with pytest.raises(ValueError, match="kind is 'int3', expected one of dense, int8"):
        rk.weight_kernel("int3", "cpu")


def test_what_multiplies_float32_by_quantized_weights_on_hopper(no_library, monkeypatch):
    """The library has nothing for float32 there: Triton's kernel, or none."""
    library = SimpleNamespace(linear_packed=object(), isa="sm_90")
    monkeypatch.setattr(_loader, "bind", library)
    monkeypatch.setattr(_loader, "backend", "cuda")
    for is_installed, expected in ((True, "triton"), (False, "reference")):
        monkeypatch.setattr(_dispatch, "triton_installed", lambda found=is_installed: found)
        assert rk.weight_kernel("int4", "cuda")[0] == "cuda:sm_90"
        assert rk.weight_kernel("int4", "cuda", "float32")[0] == expected


def test_keys_and_ops():
    said = rk.capabilities()
    assert set(said) == {
        "backend", "version", "abi_version", "isa", "devices", "problem", "runtime", "python",
        "ops", "weights",
    }  # fmt: skip
    assert said["version"] == rk.__version__ == (ROOT / "kernel/VERSION").read_text().strip()
    public = {name for name in rk.__all__ if callable(getattr(rk, name))}
    not_ops = {
        "ClampedSwiGlu", "Decoder", "GpuCommunicator", "LogitEdits", "PackedExperts", "PackedHeads",
        "PackedWeight", "PersistentDecoder", "PersistentLayer", "ShmCommunicator", "capabilities",
        "dequantize_gguf", "fp8_format",
        "get_fallback", "get_num_threads", "native_fp8", "pack_experts", "pack_merged",
        "pack_weight", "rope_cos_sin_cache", "set_fallback",
        "set_num_threads", "unpack_awq", "unpack_gguf", "unpack_gptq", "unpack_weight",
        "weight_kernel",
    }  # fmt: skip
    assert set(said["ops"]) == public - not_ops
    for op, dtypes in said["ops"].items():
        assert dtypes, op
        for entry in dtypes.values():
            assert entry["impl"] and entry["why"]
            native = hasattr(_loader.bind, _NATIVE_NAMES.get(op, op))
            if said["backend"] == "cpu":
                assert (entry["impl"] == f"cpu:{said['isa']}") == native, op
    json.dumps(said)


def test_without_a_library_the_reference_runs_after_one_warning(no_library):
    x = torch.randn(3, 8)
    w = torch.ones(8)
    with pytest.warns(RuntimeWarning, match="no native library for this test") as seen:
        rk.rmsnorm(x, w)
        rk.rmsnorm(x, w)
        rk.silu_and_mul(x)
    assert len(seen) == 1
    assert Path(seen[0].filename).name != "_dispatch.py"
    entry = rk.capabilities()["ops"]["rmsnorm"]["float32"]
    assert entry == {"impl": "reference", "why": "no native library for this test"}


def test_fallback_modes(no_library):
    x = torch.randn(3, 8)
    w = torch.ones(8)
    rk.set_fallback("error")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rmsnorm on cpu.*no native library"):
            rk.rmsnorm(x, w)
    rk.set_fallback("reference")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rk.rmsnorm(x, w)
    with pytest.raises(ValueError, match="mode"):
        rk.set_fallback("silent")


def test_dense_products_on_a_gpu_are_not_a_fallback(no_library):
    class OnGpu:
        class device:
            type = "cuda"

    rk.set_fallback("error")
    assert _dispatch.native("pack_weight", OnGpu()) is None
    assert _dispatch.describe("linear_packed", "cuda")[0] == "torch"
    with pytest.raises(RuntimeError, match="rmsnorm on cuda"):
        _dispatch.native("rmsnorm", OnGpu())


@pytest.fixture
def gpu_library(monkeypatch):
    """A library of that backend and architecture; it has every op."""

    def make(backend, isa):
        class Library:
            def hip_runtime(self):
                found = "libamdhip64.so.7" if isa.startswith("gfx") else ""
                return found, "" if found else "no HIP runtime: nowhere"

            def __getattr__(self, name):
                return isa if name == "isa" else lambda *args: None

        monkeypatch.setattr(_loader, "bind", Library())
        monkeypatch.setattr(_loader, "backend", backend)
        monkeypatch.setattr(_loader, "targets", ("gfx942",) if backend == "rocm" else ())
        return rk.capabilities()["ops"]

    return make


@pytest.mark.parametrize(
    ("backend", "isa", "problem"),
    [
        ("cpu", "avx2", ""),
        ("cuda", "sm_90", ""),
        ("cuda", "no device", "the cuda library finds no GPU"),
        ("rocm", "gfx942", ""),
        ("rocm", "gfx1100", "the rocm library has code for gfx942, this GPU is gfx1100"),
        ("rocm", "no device", "the rocm library finds no GPU"),
        ("rocm", "no HIP runtime", "no HIP runtime: nowhere"),
    ],
)
def test_devices_are_those_that_the_library_serves(gpu_library, backend, isa, problem):
    """Asked of the library: torch need not have been imported."""
    gpu_library(backend, isa)
    said = rk.capabilities()
    assert said["problem"] == problem
    assert said["devices"] == ([] if problem else [backend])
    assert said["runtime"] == ("libamdhip64.so.7" if isa.startswith("gfx") else "")


def test_without_a_library_no_device_is_served(no_library):
    said = rk.capabilities()
    assert said["devices"] == []
    assert said["problem"] == "no native library for this test"


def test_dtypes_of_hopper(gpu_library, monkeypatch):
    monkeypatch.setattr(_dispatch, "triton_installed", lambda: True)
    ops = gpu_library("cuda", "sm_90")
    for op in ("flash_attn_with_kvcache", "flash_attn_varlen"):
        found = {dtype: entry["impl"] for dtype, entry in ops[op].items()}
        native = dict.fromkeys(("bfloat16", "float16", "float8_e4m3fn"), "cuda:sm_90")
        assert found == native | {"float32": "triton"}, op
        assert "no float32" in ops[op]["float32"]["why"]
    assert ops["store_kv_cache"]["float8_e4m3fn"]["impl"] == "cuda:sm_90"
    assert "int8" not in ops["store_kv_cache"]
    assert ops["fused_experts"]["float32"]["impl"] == "triton"
    assert ops["linear_silu_and_mul"]["float32"]["impl"] == "torch"
    assert ops["merge_state"]["float32"]["impl"] == "cuda:sm_90"
    assert ops["rmsnorm"]["float32"]["impl"] == "cuda:sm_90"
    assert ops["linear"]["float32"]["impl"] == "torch"
    assert ops["linear"]["bfloat16"]["impl"] == "cuda:sm_90"
    assert "64 rows" in ops["linear"]["bfloat16"]["why"]
    monkeypatch.setattr(_dispatch, "triton_installed", lambda: False)
    assert gpu_library("cuda", "sm_90")["flash_attn_varlen"]["float32"]["impl"] == "reference"


@pytest.mark.parametrize(
    "backend_and_isa", [("cuda", "sm_89"), ("cuda", "sm_100"), ("rocm", "gfx942")], ids=str
)
def test_attention_of_other_gpus(gpu_library, monkeypatch, backend_and_isa):
    monkeypatch.setattr(_dispatch, "triton_installed", lambda: True)
    backend, isa = backend_and_isa
    if backend == "rocm":  # its library has no attention
        original = _dispatch._native

        def without_attention(op, device):
            return None if op.startswith("flash") else original(op, device)

        monkeypatch.setattr(_dispatch, "_native", without_attention)
    ops = gpu_library(backend, isa)
    for op in ("flash_attn_with_kvcache", "flash_attn_varlen"):
        assert {entry["impl"] for entry in ops[op].values()} == {"triton"}, op
        assert ("float8_e4m3fnuz" in ops[op]) == (backend == "rocm")
    assert ops["merge_state"]["bfloat16"]["impl"] == f"{backend}:{isa}"


def test_products_of_other_gpus(gpu_library, monkeypatch):
    monkeypatch.setattr(_dispatch, "triton_installed", lambda: True)
    ops = gpu_library("cuda", "sm_89")
    assert ops["linear"]["bfloat16"]["impl"] == "torch"
    for op in ("fp8_blockwise_scaled_mm", "bmm_fp8", "m_grouped_gemm_masked"):
        assert ops[op]["float8_e4m3fn"]["impl"] == "triton", op
        assert "float8_e4m3fnuz" not in ops[op]
    assert ops["per_token_quant_int8"]["bfloat16"]["impl"] == "cuda:sm_89"
    assert "float8_e4m3fnuz" in gpu_library("rocm", "gfx942")["fp8_scaled_mm"]


def test_native_functions_are_found_as_they_appear(no_library, monkeypatch):
    class Library:
        calls: list[tuple] = []

        @classmethod
        def silu_and_mul(cls, *args):
            cls.calls.append(args)

    monkeypatch.setattr(_loader, "bind", Library)
    monkeypatch.setattr(_loader, "backend", "cpu")
    rk.set_fallback("warn")
    x = torch.randn(2, 8)
    out = torch.empty(2, 4)
    assert rk.silu_and_mul(x, out=out) is out
    assert Library.calls == [(x, out)]
    with pytest.warns(RuntimeWarning, match="has no rmsnorm"):
        rk.rmsnorm(x, torch.ones(8))


def test_reference_calls_do_not_join_autograd(no_library):
    x = torch.randn(2, 8, requires_grad=True)
    out = rk.rmsnorm(x, torch.ones(8, requires_grad=True))
    assert not out.requires_grad


def test_import_loads_no_framework():
    code = "import sys, radix_kernels as rk; rk.capabilities(); print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": IMPORT_PATH},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert result.stdout.strip() == "False"


def test_arrays():
    x = np.zeros((2, 3), dtype=np.float32)
    assert _arrays.device_type(x) == _arrays.device_type(torch.zeros(1)) == "cpu"
    assert _arrays.dtype_name(x) == _arrays.dtype_name(torch.zeros(1)) == "float32"
    made = _arrays.empty(x, (4,), "int32")
    assert isinstance(made, np.ndarray) and made.shape == (4,) and made.dtype == np.int32
    with pytest.raises(TypeError, match="tensor"):
        _arrays.device_type([1.0])
    shared = _arrays.as_torch(x)
    shared[0, 0] = 5
    assert x[0, 0] == 5
    with pytest.raises(AttributeError):
        _ = rk.no_such_name


def test_threads():
    before = rk.get_num_threads()
    try:
        rk.set_num_threads(2)
        assert rk.get_num_threads() == 2
        for bad in (0, -1, 1025):
            with pytest.raises(ValueError):
                rk.set_num_threads(bad)
    finally:
        rk.set_num_threads(before)


def test_a_dtype_that_triton_refuses_has_the_reference(monkeypatch):
    """The self-test on a GPU called float32 `mla_decode` wrong, which Triton's kernel refuses."""
    monkeypatch.setattr(_dispatch, "triton_installed", lambda: True)
    monkeypatch.setattr(_dispatch, "_native", lambda op, device: None)
    assert _dispatch.describe("mla_decode", "cuda", "bfloat16")[0] == "triton"
    assert _dispatch.describe("mla_decode", "cuda", "float32")[0] == "reference"
