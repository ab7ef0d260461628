"""FP8 as on a GPU: the wheel's products, here by their references, against float64 of the codes and
of x quantized by the definition; and whole models on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import radix_kernels
from radix_runtime import ops
from radix_runtime.config import ServerArgs
from radix_runtime.engine.facts import weight_bytes
from radix_runtime.errors import ConfigError
from radix_runtime.layers.base import BuildContext, Layer
from radix_runtime.layers.linear import ColumnParallelLinear, QKVLinear, RowParallelLinear
from radix_runtime.quantization.config import Target
from radix_runtime.quantization.fp8_config import Fp8Config, Fp8FromFloats
from radix_runtime.quantization.fp8_products import Fp8BlockMethod, Fp8RowMethod
from radix_runtime.quantization.storage import WidenedMethod
from tests.runtime import quantized_models as q
from tests.runtime.model_steps import FusingCommunicator, ThreadCommunicator, run_ranks
from tests.runtime.test_layers import Source, context
from tests.runtime.tiny_models import Driver, Sequence, random_ids, reference_logits

torch.set_num_threads(1)
GPU = Target(device=torch.device("cuda"), dtype=torch.bfloat16)
ROUNDED = 6e-3  # of bfloat16 results
OF_A_MODEL = 0.2  # x in FP8 is 3 % off in every product; a wrong scale is several times as much
TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """References run silently. Ranks are threads here, so what one rank's loading asks of the
    process must not change what another's forward may run: a rank without experts needs fewer
    kernels, and would make `fused_experts` of the others an error."""
    monkeypatch.setattr(ops, "use_native", lambda *_args, **_options: None)
    before = radix_kernels.get_fallback()
    radix_kernels.set_fallback("reference")
    yield
    radix_kernels.set_fallback(before)


def on_gpu(settings: dict[str, Any], rank: int = 0, size: int = 1) -> BuildContext:
    return context(
        rank, size, quantization=Fp8Config.from_checkpoint(settings, GPU), dtype=torch.bfloat16
    )


def load(layer: Layer, tensors: dict[Any, q.Tensors]) -> None:
    """Every parameter of a layer, from the files' tensors by part."""
    for name, param in list(layer.named_parameters(recurse=False)):
        memory = torch.empty(param.shape, dtype=param.dtype)
        setattr(layer, name, torch.nn.Parameter(memory, requires_grad=False))
        for part in layer.parts(name):
            source = Source(tensors[part][layer.suffix(name)])
            layer.weight_loader(name, memory, source, part)
    for name in [name for name, _ in layer.named_parameters(recurse=False)]:
        layer.finalize(name)


def quantized(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x as FP8 with this scale, float64."""
    codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.double() * scale.double()


def by_token(x: torch.Tensor) -> torch.Tensor:
    return quantized(x, x.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448)


def by_group(x: torch.Tensor) -> torch.Tensor:
    return by_token(x.unflatten(-1, (-1, 128))).flatten(-2)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found.double() - expected).norm() / expected.norm()) < ROUNDED


def made(quantize: q.Quantize, sizes: dict[Any, int], inputs: int) -> tuple[Any, torch.Tensor]:
    """Tensors of the parts, and what they stand for together, float64."""
    parts = {part: quantize(torch.randn(size, inputs)) for part, size in sizes.items()}
    widened = torch.cat([parts[part][1] for part in sizes]).double()
    return {part: tensors for part, (tensors, _) in parts.items()}, widened


def test_blocks() -> None:
    tensors, weight = made(q.fp8_block, {"gate_proj": 256, "up_proj": 128}, 384)
    outputs = {"gate_proj": 256, "up_proj": 128}
    layer = ColumnParallelLinear(on_gpu(q.FP8_BLOCK), in_features=384, outputs=outputs)
    load(layer, tensors)
    assert isinstance(layer.method, Fp8BlockMethod)
    assert layer.weight.dtype == torch.float8_e4m3fn
    x = torch.randn(5, 384).bfloat16()
    assert close(layer(x), by_group(x) @ weight.T)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_inputs_of_a_rank_in_blocks(rank: int) -> None:
    """With a bias, a residual, and a last block of outputs that is not full."""
    tensors, weight = made(q.fp8_odd_block, {None: 200}, 512)
    bias = torch.randn(200).bfloat16()
    tensors[None]["bias"] = bias
    layer = RowParallelLinear(
        on_gpu(q.FP8_BLOCK, rank, 2), in_features=512, out_features=200, bias=True
    )
    load(layer, tensors)
    assert isinstance(layer.method, Fp8BlockMethod) and len(layer.weight) == 256
    x = torch.randn(3, 256).bfloat16()
    residual = torch.randn(3, 200).bfloat16()
    expected = by_group(x) @ weight[:, 256 * rank : 256 * (rank + 1)].T
    if rank == 0:
        expected += bias.double() + residual.double()
    assert close(layer(x, residual.clone()), expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_cut_across_a_block_is_widened(rank: int) -> None:
    tensors, weight = made(q.fp8_odd_block, {None: 64}, 384)
    layer = RowParallelLinear(on_gpu(q.FP8_BLOCK, rank, 2), in_features=384, out_features=64)
    load(layer, tensors)
    assert type(layer.method) is WidenedMethod
    x = torch.randn(3, 192).bfloat16()
    assert close(layer(x), x.double() @ weight[:, 192 * rank : 192 * (rank + 1)].T)


@pytest.mark.parametrize(("kv_heads", "size"), [(1, 1), (2, 2), (1, 2)])
def test_heads_of_half_a_block(kv_heads: int, size: int) -> None:
    """Keys and values begin inside of blocks: theirs, not the merged weight's."""
    sizes = {"q_proj": 6 * 64, "k_proj": kv_heads * 64, "v_proj": kv_heads * 64}
    tensors, _ = made(q.fp8_odd_block, sizes, 256)
    widened = {
        part: (t["weight"].float() * t["weight_scale_inv"].repeat_interleave(128, 0)[
            : len(t["weight"])].repeat_interleave(128, 1)).double()
        for part, t in tensors.items()
    }  # fmt: skip
    x = torch.randn(3, 256).bfloat16()
    for rank in range(size):
        layer = QKVLinear(
            on_gpu(q.FP8_BLOCK, rank, size),
            256,
            head_dim=64,
            num_heads=6,
            num_kv_heads=kv_heads,
            bias=False,
        )
        load(layer, tensors)
        for found, part in zip(layer(x).split(layer.sizes, -1), sizes, strict=True):
            block = layer.block(part)
            rows = widened[part][block.first : block.first + block.size]
            assert close(found, x.double() @ rows.T), (rank, part)


@pytest.mark.parametrize("is_static", [False, True])
def test_merged_tensors_keep_their_scales(is_static: bool) -> None:
    """q, k and v of one scale each, and a scale of x where the file has one."""
    sizes = {"q_proj": 128, "k_proj": 64, "v_proj": 64}
    tensors, weight = made(q.fp8_tensor, sizes, 256)
    tensors["k_proj"]["weight_scale"] *= 3
    weight[128:192] *= 3
    settings = {**TENSOR, "activation_scheme": "static" if is_static else "dynamic"}
    layer = QKVLinear(on_gpu(settings), 256, head_dim=64, num_heads=2, num_kv_heads=1, bias=False)
    if is_static:
        scale = torch.tensor([0.02, 0.03, 0.01])
        for part, value in zip(sizes, scale, strict=True):
            tensors[part]["input_scale"] = value
    load(layer, tensors)
    assert isinstance(layer.method, Fp8RowMethod)
    x = torch.randn(4, 256).bfloat16()
    x_used = quantized(x, torch.tensor(0.03)) if is_static else by_token(x)
    assert close(layer(x), x_used @ weight.T)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("source", ["checkpoint", "at load"])
def test_fast_sums_where_they_are_asked_for(
    source: str, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def product(*operands: torch.Tensor, fast_accum: bool = False, **options: Any) -> Any:
        seen.append(fast_accum)
        return radix_kernels.fp8_scaled_mm(*operands, **options)

    monkeypatch.setattr(ops, "fp8_scaled_mm", product)
    target = Target(device=torch.device("cuda"), dtype=torch.bfloat16, fp8_fast_accum=fast)
    if source == "checkpoint":
        quantization: Any = Fp8Config.from_checkpoint(TENSOR, target)
        tensors, weight = made(q.fp8_tensor, {"a": 128}, 256)
    else:
        quantization = Fp8FromFloats.at_load("fp8", target)
        weight = torch.randn(128, 256).bfloat16()
        tensors = {"a": {"weight": weight}}
    ctx = context(quantization=quantization, dtype=torch.bfloat16)
    layer = ColumnParallelLinear(ctx, in_features=256, outputs={"a": 128})
    load(layer, tensors)
    x = torch.randn(3, 256).bfloat16()
    found = layer(x)
    if source == "checkpoint":
        assert close(found, by_token(x) @ weight.T)
    assert seen == [fast]


def test_fast_sums_of_a_model_without_such_products(tmp_path: Path) -> None:
    q.save(q.random_model("llama"), tmp_path)
    args = ServerArgs(model_path=str(tmp_path), fp8_fast_accum=True)
    with pytest.raises(ConfigError, match=r"--fp8-fast-accum: no product of this model"):
        Driver(tmp_path, args=args)


def test_fast_sums_on_another_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q.save(q.random_model("llama"), tmp_path)
    target = Target(device=torch.device("cuda"), dtype=torch.bfloat16, fp8_fast_accum=True)
    args = ServerArgs(model_path=str(tmp_path), quantization="fp8", fp8_fast_accum=True)
    with pytest.raises(ConfigError, match="--fp8-fast-accum changes nothing on sm_89"):
        monkeypatch.setattr(ops, "capabilities", lambda: {"isa": "sm_89"})
        Driver(tmp_path, dtype=torch.bfloat16, args=args, target=target)
    monkeypatch.setattr(ops, "capabilities", lambda: {"isa": "sm_90"})
    Driver(tmp_path, dtype=torch.bfloat16, args=args, target=target)


def test_amds_form_of_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the value for the same bits, and one zero: codes and scales stand for the same."""
    monkeypatch.setattr("radix_kernels.fp8.fp8_format", lambda: "float8_e4m3fnuz")
    tensors, weight = made(q.fp8_block, {"a": 128}, 128)
    tensors["a"]["weight"].view(torch.uint8)[0, 0] = 0x80  # minus zero, NaN in AMD's form
    weight[0, 0] = 0
    layer = ColumnParallelLinear(on_gpu(q.FP8_BLOCK), in_features=128, outputs={"a": 128})
    load(layer, tensors)
    assert layer.weight.dtype == torch.float8_e4m3fnuz
    found = layer.weight.double() * layer.weight_scale.double()
    assert torch.allclose(found, weight, rtol=1e-6, atol=0)


def test_amds_form_of_a_static_input_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radix_kernels.fp8.fp8_format", lambda: "float8_e4m3fnuz")
    tensors, _ = made(q.fp8_tensor, {"a": 128}, 128)
    settings = {**TENSOR, "activation_scheme": "static"}
    layer = ColumnParallelLinear(on_gpu(settings), in_features=128, outputs={"a": 128})
    tensors["a"]["input_scale"] = torch.tensor(0.03)
    load(layer, tensors)
    assert layer.weight.dtype == torch.float8_e4m3fnuz
    assert layer.input_scale.item() == pytest.approx(0.06)


def gpu_driver(folder: Path, comm: ThreadCommunicator, args: ServerArgs | None = None) -> Driver:
    """A rank that holds the checkpoint as a GPU does, in bfloat16."""
    return Driver(
        folder,
        dtype=torch.bfloat16,
        communicator=comm,  # type: ignore[arg-type]
        args=args,
        target=GPU,
    )


def relative(driver: Driver, reference: Any) -> float:
    """The median of the rows of one step's logits, for a close choice of experts may fall the other
    way; 0 on ranks without."""
    ids = random_ids(driver.config, 40, seed=3)
    logits = driver.step([(Sequence(0, ids), len(ids))])
    if logits is None:
        return 0.0
    expected = reference_logits(reference, ids)
    return float(((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., q.Checkpoint]:
    def make(name: str, quantize: Any, settings: dict[str, Any]) -> q.Checkpoint:
        return q.write(q.random_model(name), tmp_path / "model", quantize, settings)

    return make


@pytest.mark.parametrize(
    ("form", "model", "ranks"),
    [
        ("fp8_block", "llama", 2),
        ("fp8_block", "qwen3_moe", 1),
        ("fp8_block", "qwen3_moe", 2),
        ("fp8_block", "qwen3_moe_narrow", 2),  # 192 of the width: experts are split by expert
        ("fp8_block", "qwen3_moe_few", 4),  # of three experts one rank has none
        ("fp8_block", "qwen3_moe_768", 4),  # 192 again
        ("fp8_odd_block", "deepseek_v3", 2),  # blocks that are not full; latent attention
        ("fp8_tensor", "llama", 1),
        ("fp8_tensor", "qwen3_moe", 2),
        ("FP8_DYNAMIC", "qwen3_moe", 2),
        ("FP8_DYNAMIC", "llama", 2),
        ("FP8", "llama", 1),
        ("FP8_BLOCK", "qwen3_moe", 1),
    ],
)
def test_models(form: str, model: str, ranks: int, checkpoint: Any) -> None:
    of_transformers = {
        "fp8_block": (q.fp8_block, q.FP8_BLOCK),
        "fp8_odd_block": (q.fp8_odd_block, q.FP8_BLOCK),
        "fp8_tensor": (q.fp8_tensor, q.FP8_TENSOR),
    }
    quantize, settings = of_transformers.get(form) or q.compressed(form)
    files = checkpoint(model, quantize, settings)

    def work(comm: ThreadCommunicator) -> float:
        driver = gpu_driver(files.folder, comm)
        if model == "qwen3_moe_narrow":
            assert len(driver.model.model.layers[0].mlp.experts.local) < 5
        return relative(driver, files.reference)

    assert 1e-3 < run_ranks(ranks, work)[0] < OF_A_MODEL


def test_a_last_block_that_is_not_full_on_ranks(tmp_path: Path) -> None:
    """What the ranks sum is contiguous, though the product has outputs more."""
    files = q.write(q.random_model("llama_192"), tmp_path, q.fp8_odd_block, q.FP8_BLOCK)

    def work(comm: FusingCommunicator) -> float:
        driver = gpu_driver(files.folder, comm)
        assert len(driver.model.model.layers[0].self_attn.o_proj.weight) == 256
        return relative(driver, files.reference)

    assert 1e-3 < run_ranks(2, work, FusingCommunicator)[0] < OF_A_MODEL


def test_float32_is_widened(checkpoint: Any) -> None:
    """The comparison for a GPU's answers: the same codes, nothing rounded."""
    files = checkpoint("llama", q.fp8_block, q.FP8_BLOCK)
    target = Target(device=torch.device("cuda"), dtype=torch.float32)
    assert relative(Driver(files.folder, target=target), files.reference) < 1e-5


@pytest.mark.parametrize("model", ["llama", "qwen3_moe", "qwen3_moe_narrow"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_quantized_as_it_loads(model: str, ranks: int, tmp_path: Path) -> None:
    reference = q.random_model(model)
    q.save(reference, tmp_path)
    args = ServerArgs(model_path=str(tmp_path), quantization="fp8")

    def work(comm: ThreadCommunicator) -> float:
        driver = gpu_driver(tmp_path, comm, args)
        attention = driver.model.model.layers[0].self_attn
        assert attention.o_proj.weight.dtype == torch.float8_e4m3fn
        assert attention.o_proj.held_bytes() == weight_bytes(attention.o_proj)
        assert driver.model.lm_head.weight.dtype != torch.float8_e4m3fn
        return relative(driver, reference)

    assert 1e-3 < run_ranks(ranks, work)[0] < OF_A_MODEL


def test_experts_of_odd_sizes_are_refused_at_load(tmp_path: Path) -> None:
    reference = q.random_model("qwen3_moe_odd")
    q.save(reference, tmp_path)
    args = ServerArgs(model_path=str(tmp_path), quantization="fp8")
    with pytest.raises(ConfigError, match=r"experts\.0\.gate_up_proj: .*blocks of 128"):
        Driver(tmp_path, dtype=torch.bfloat16, args=args, target=GPU)


def test_where_it_cannot_quantize() -> None:
    target = Target(device=torch.device("cuda"), dtype=torch.float32)
    with pytest.raises(ConfigError, match="bfloat16 or float16"):
        Fp8Config.at_load("fp8", target)


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    reference = q.random_model("llama")
    with torch.no_grad():
        reference.model.layers[1].mlp.down_proj.weight[3, 5] = float("nan")
    q.save(reference, tmp_path)
    args = ServerArgs(model_path=str(tmp_path), quantization="fp8")
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.down_proj\.weight .*not finite"):
        Driver(tmp_path, dtype=torch.bfloat16, args=args, target=GPU)
