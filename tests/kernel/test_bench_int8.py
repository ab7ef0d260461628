"""The rows of `bench.kernels` in INT8: what each contender multiplies or quantizes is right on the
CPU, what vLLM's ops are given has the shapes that they ask for, and no peer need be there."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import radix_kernels as rk
from bench.kernels import __main__ as command
from bench.kernels import harness, peers
from bench.kernels.families import FAMILIES
from bench.kernels.families.gemm import int8_case
from bench.kernels.families.quantize import EPS, NAMES
from bench.kernels.families.quantize import rows as quantize_rows
from bench.kernels.families.quantized_experts import cases, qwen_experts
from bench.kernels.harness import Case
from tests.kernel.gemm_cases import exact
from tests.kernel.helpers import ROUNDED_ONCE, assert_close

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
DTYPE = torch.bfloat16
ISSUED = ("16x6144x4096", "64x28672x4096", "256x28672x4096", "4096x28672x4096")

pytestmark = pytest.mark.cpu_only


class Vllm:
    """Stands in for `vllm._custom_ops`, with its signatures: products take what CUTLASS's can, and
    quantizations are ours."""

    def cutlass_scaled_mm(
        self, a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: Any
    ) -> torch.Tensor:
        assert a.dtype == b.dtype == torch.int8
        assert a.is_contiguous() and b.stride(0) == 1
        assert b.shape[0] % 16 == b.shape[1] % 16 == 0
        assert scale_a.numel() == a.shape[0] and scale_b.numel() == b.shape[1]
        assert scale_a.is_contiguous() and scale_b.is_contiguous()
        return exact(a, b, scale_a, scale_b).to(out_dtype)

    def cutlass_scaled_mm_azp(
        self, a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: Any, azp_adj: Any, azp: Any
    ) -> torch.Tensor:
        assert azp_adj.dtype == azp.dtype == torch.int32
        assert azp_adj.numel() == b.shape[1] and azp.numel() == a.shape[0]
        self.cutlass_scaled_mm(a, b, scale_a, scale_b, out_dtype)
        assert torch.equal(azp_adj, b.sum(0, dtype=torch.int32))
        return exact(a, b, scale_a, scale_b, azp=azp).to(out_dtype)

    def scaled_int8_quant(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        assert x.is_contiguous()
        return *rk.per_token_quant_int8(x), None

    def scaled_fp8_quant(self, x: Any, *, use_per_token_if_dynamic: bool) -> Any:
        assert x.is_contiguous() and use_per_token_if_dynamic
        return rk.per_token_quant_fp8(x)

    def rms_norm_dynamic_per_token_quant(
        self, x: Any, weight: Any, epsilon: float, quant_dtype: Any, *, residual: Any
    ) -> Any:
        assert x.is_contiguous() and weight.dtype == x.dtype
        form = next(form for form in NAMES.values() if form.dtype == quant_dtype)
        assert epsilon == EPS
        return form.normed(x, weight, residual)


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    assert x.shape == (out.shape[0], 2 * out.shape[1])
    rk.silu_and_mul(x, out=out)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "load", {"vllm._custom_ops": Vllm()}.get)
    monkeypatch.setattr(torch.ops._C, "silu_and_mul", silu_and_mul, raising=False)


def clones(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same where nothing has been added in place."""
    return tuple(
        None if x is None else x.clone(memory_format=torch.preserve_format) for x in inputs
    )


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 17, 64])
def test_products(vllm: None, tokens: int, shifted: bool) -> None:
    case = int8_case(CPU, tokens, 48, 272, shifted=shifted)
    a, b, sa, sb, *zeros = inputs = case.make_inputs()
    assert a.unique().numel() > 100 and b.unique().numel() > 100
    sums = {"cuBLASLt sums"} if tokens > 16 and not shifted else set()
    assert set(case.contenders) == {"radix", "vLLM CUTLASS"} | sums
    expected = exact(a, b, sa, sb, azp=zeros[0] if zeros else None)
    for name, fn in case.contenders.items():
        result = fn(*inputs)
        if name == "cuBLASLt sums":
            assert torch.equal(result.double(), a.double() @ b.double())
        else:
            assert result.dtype == DTYPE
            assert_close("int8_scaled_mm", result, expected, ROUNDED_ONCE[DTYPE])


def test_the_products_of_a_run() -> None:
    """Built without a GPU: nothing is made before a row is measured."""
    rows = [case for case in FAMILIES["gemm"](CUDA, DTYPE) if "int8" in case.op]
    for op in ("int8_scaled_mm", "int8_scaled_mm azp"):
        assert tuple(case.shape for case in rows if case.op == op) == ISSUED
    assert all(case.dtype == torch.int8 for case in rows)


def truth(op: str, x: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
    """What a row quantizes, in float64. others: a norm's weight, and a residual or None."""
    wide = x.double()
    if op.startswith("per_token"):
        return wide
    if op.startswith("silu"):
        gate, up = wide.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up
    weight, residual = others
    assert weight is not None
    total = wide if residual is None else wide + residual.double()
    return total * (total.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


SMALL = [
    (case.op, case.shape)
    for case in quantize_rows(CPU, DTYPE)
    if case.shape.startswith(("1x", "64x"))
]


@pytest.mark.parametrize(("op", "shape"), SMALL)
def test_quantizations(op: str, shape: str, vllm: None) -> None:
    (case,) = (c for c in quantize_rows(CPU, DTYPE) if (c.op, c.shape) == (op, shape))
    apart = set() if op.startswith("per_token") else {"separate"}
    theirs = "vllm, two kernels" if op.startswith("silu") else "vllm"
    assert set(case.contenders) == {"radix", theirs} | apart
    inputs = case.make_inputs()
    expected = truth(op, *inputs)
    for name, fn in case.contenders.items():
        given = clones(inputs)
        codes, scales, *_ = fn(*given)
        assert codes.dtype == NAMES["int8" if "int8" in op else "fp8"].dtype
        error = (codes.double() * scales.double() - expected).norm() / expected.norm()
        assert error < 0.06, (name, float(error))
        if "residual" in op:
            assert torch.equal(given[2], (inputs[0].float() + inputs[2].float()).to(DTYPE))


def test_the_bytes_of_a_quantization() -> None:
    moved = {(c.op, c.shape): c.bytes for c in quantize_rows(CPU, DTYPE)}
    assert moved["per_token_quant_int8", "64x4096"] == 64 * 4096 * 3
    assert moved["silu_and_mul_quant_int8", "64x14336"] == 64 * 14336 * 5
    assert moved["rmsnorm_quant_int8", "1x4096"] == 4096 * 3
    assert moved["rmsnorm_quant_int8 residual", "1x4096"] == 4096 * 7
    assert list(FAMILIES["quantize"](CPU, DTYPE)) == []


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_experts(kind: str) -> None:
    """The bytes of a layer in Hopper's layout, which here has nothing to pad."""
    layer = qwen_experts(kind, CPU, DTYPE)
    assert layer.tokens == (1, 16, 64, 512, 4096)
    assert (layer.experts, layer.topk, layer.hidden, layer.inter) == (128, 8, 2048, 768)
    for n, k in ((2 * 768, 2048), (2048, 768)):
        weight = layer.weight(n, k)
        codes = n * k * {"int4": 4, "int8": 8}[kind] // 8
        assert weight.nbytes == codes + n * (k // 128) * 2
        assert (weight.kind, weight.group, weight.layout) == (kind, 128, "fragments64")
        assert weight.data[:codes].unique().numel() == 256
        scales = weight.data[codes:].view(torch.bfloat16)
        assert scales.isfinite().all() and (scales >= 0).all() and scales.any()


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_the_experts_are_those_of_hoppers_kernel(kind: str) -> None:
    layer = replace(qwen_experts(kind, CPU, DTYPE), experts=3, topk=2, tokens=(1, 5))
    assert layer.packed.stacked is not None
    for case, tokens in zip(cases(layer), layer.tokens, strict=True):
        assert case.shape == f"{kind} g128 {tokens}xE3 k2 H2048 I768"
        assert set(case.contenders) == {"radix", "our bf16, plain"}
        named = 3 * (1 - (1 / 3) ** tokens)
        assert case.bytes == pytest.approx(
            named * layer.packed.nbytes / 3 + 2 * tokens * 2048 * 2, rel=1e-9
        )
        x, weights, ids, logits = case.make_inputs()
        assert x.shape == (tokens, 2048) and logits.shape == (tokens, 3)
        assert weights.shape == ids.shape == (tokens, 2) and ids.dtype == torch.int32


def test_without_peers_we_are_alone() -> None:
    rows = [
        int8_case(CPU, 1, 48, 272, shifted=False),
        int8_case(CPU, 1, 48, 272, shifted=True),
        *(c for c in quantize_rows(CPU, DTYPE) if c.shape.startswith("1x")),
    ]
    assert {name for case in rows for name in case.contenders} == {"radix", "separate"}


def test_a_peer_without_the_op_costs_itself_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "load", lambda name: SimpleNamespace())
    monkeypatch.setattr(harness, "ROUND_SECONDS", 0.0)
    monkeypatch.setattr(harness, "MAX_SETS", {"cpu": 2})
    for case in (
        int8_case(CPU, 1, 48, 272, shifted=True),
        next(c for c in quantize_rows(CPU, DTYPE) if c.op == "per_token_quant_int8"),
    ):
        assert set(harness.measure(case, CPU).timings) == {"radix"}
        assert f" for {case.op} {case.shape}: AttributeError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "ops"),
    [
        (["--ops", "azp"], {"int8_scaled_mm azp"}),
        (["--ops", "int8", "--shapes", "16x"], {"int8_scaled_mm", "int8_scaled_mm azp"}),
    ],
)
def test_rows_by_their_op(asked: list[str], ops: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(case: Case, device: torch.device, **options: Any) -> harness.Row:
        measured.append((case.op, case.shape))
        timing = harness.Timing(median_us=1, low_us=1, high_us=1)
        return harness.Row(case.facts(), {"radix": timing})

    limits = command.Limits(device="", read_gbs=1, copy_gbs=1, tflops={torch.float32: 1.0})
    monkeypatch.setattr(command, "measure_limits", lambda device: limits)
    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setattr(rk, "set_num_threads", lambda n: None)
    monkeypatch.setattr(sys, "argv", ["bench", "gemm", "--backend", "cuda", *asked])
    command.main()
    assert {op for op, _ in measured} == ops
    if "--shapes" in asked:
        assert {shape for _, shape in measured} == {ISSUED[0]}
    monkeypatch.setattr(sys, "argv", ["bench", "gemm", "--ops", "a", "b", "--shapes", "c"])
    with pytest.raises(SystemExit, match="no case: no op contains a or b, or no shape contains c"):
        command.main()
