"""FP8 on the CPU: held as it is in the files, and x multiplied as it is; layers against float64 of
the codes, and what `--quantization fp8` does there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import radix_kernels
from radix_runtime.config import ServerArgs
from radix_runtime.engine.facts import weight_bytes
from radix_runtime.errors import ConfigError
from radix_runtime.layers.base import BuildContext
from radix_runtime.layers.linear import ColumnParallelLinear, QKVLinear, RowParallelLinear
from radix_runtime.quantization.config import Target
from radix_runtime.quantization.fp8_config import Fp8Config
from radix_runtime.quantization.fp8_packed import Fp8PackedMethod
from radix_runtime.quantization.storage import WidenedMethod
from tests.runtime import quantized_models as q
from tests.runtime.test_fp8_products import load, made
from tests.runtime.test_layers import context
from tests.runtime.tiny_models import Driver, Sequence, random_ids, reference_logits, relative_error

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(
    radix_kernels.capabilities()["weights"]["fp8"]["impl"] == "none", reason="the CPU's kind"
)
CPU = torch.device("cpu")
EXACT = 1e-6  # of float32 results
OF_A_MODEL = 1e-5


def on_cpu(
    settings: dict[str, Any], rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32
) -> BuildContext:
    config = Fp8Config.from_checkpoint(settings, Target(device=CPU, dtype=dtype))
    return context(rank, size, quantization=config, dtype=dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_x_is_not_rounded_to_fp8(dtype: torch.dtype) -> None:
    """In a compute type of 16 bits the sums are rounded to it, once."""
    outputs = {"gate_proj": 256, "up_proj": 128}
    tensors, weight = made(q.fp8_block, outputs, 384)
    layer = ColumnParallelLinear(on_cpu(q.FP8_BLOCK, dtype=dtype), in_features=384, outputs=outputs)
    load(layer, tensors)
    assert isinstance(layer.method, Fp8PackedMethod)
    assert (layer.weight.kind, layer.weight.group) == ("fp8", 128)
    x = torch.randn(5, 384).to(dtype)
    bound = EXACT if dtype == torch.float32 else torch.finfo(dtype).eps
    assert error(layer(x), x.double() @ weight.T) < bound


@pytest.mark.parametrize(
    ("inputs", "groups"),
    [
        (512, [128]),
        (512, [128, 128]),
        (384, [128, 64]),  # the second rank begins in the middle of a block
        (320, [128, 32]),
        (288, [128, 16]),
        (200, [128]),  # a last block that is not full
        (256, [0, 0]),  # a block for each rank
        (96, [0]),
    ],
)
def test_groups_of_ranks(inputs: int, groups: list[int]) -> None:
    tensors, weight = made(q.fp8_odd_block, {None: 200}, inputs)
    x = torch.randn(3, inputs)
    found = torch.zeros(3, 200, dtype=torch.float64)
    share = inputs // len(groups)
    for rank, group in enumerate(groups):
        ctx = on_cpu(q.FP8_BLOCK, rank, len(groups))
        layer = RowParallelLinear(ctx, in_features=inputs, out_features=200)
        load(layer, tensors)
        assert layer.weight.group == group
        assert layer.held_bytes() == weight_bytes(layer)
        found += layer(x[:, rank * share : (rank + 1) * share].contiguous()).double()
    assert error(found, x.double() @ weight.T) < EXACT


def test_what_no_group_fits_is_widened() -> None:
    """The second rank begins 10 inputs behind a block's first."""
    tensors, weight = made(q.fp8_odd_block, {None: 64}, 276)
    x = torch.randn(3, 276)
    for rank, expected in enumerate((Fp8PackedMethod, WidenedMethod)):
        ctx = on_cpu(q.FP8_BLOCK, rank, 2)
        layer = RowParallelLinear(ctx, in_features=276, out_features=64)
        load(layer, tensors)
        assert type(layer.method) is expected
        columns = slice(138 * rank, 138 * (rank + 1))
        assert (
            error(layer(x[:, columns].contiguous()), x[:, columns].double() @ weight[:, columns].T)
            < EXACT
        )


@pytest.mark.parametrize("is_static", [False, True])
def test_merged_tensors_keep_their_scales(is_static: bool) -> None:
    """q, k and v of one scale each. A scale of x is read and not used."""
    sizes = {"q_proj": 128, "k_proj": 64, "v_proj": 64}
    tensors, weight = made(q.fp8_tensor, sizes, 256)
    tensors["k_proj"]["weight_scale"] *= 3
    weight[128:192] *= 3
    for part in sizes:
        tensors[part]["input_scale"] = torch.tensor(1e-4)  # x would be clamped at 0.045
    settings = {**q.FP8_TENSOR, "activation_scheme": "static" if is_static else "dynamic"}
    layer = QKVLinear(on_cpu(settings), 256, head_dim=64, num_heads=2, num_kv_heads=1, bias=False)
    load(layer, tensors)
    assert (layer.weight.kind, layer.weight.group) == ("fp8", 0)
    x = torch.randn(4, 256)
    assert error(layer(x), x.double() @ weight.T) < EXACT


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_heads_of_half_a_block(kv_heads: int) -> None:
    """Keys and values begin inside of blocks: theirs, not the merged weight's."""
    sizes = {"q_proj": 6 * 64, "k_proj": kv_heads * 64, "v_proj": kv_heads * 64}
    tensors, weight = made(q.fp8_odd_block, sizes, 256)
    options = {"head_dim": 64, "num_heads": 6, "num_kv_heads": kv_heads, "bias": False}
    layer = QKVLinear(on_cpu(q.FP8_BLOCK), 256, **options)
    load(layer, tensors)
    x = torch.randn(3, 256)
    assert error(layer(x), x.double() @ weight.T) < EXACT


@pytest.mark.parametrize("block", [[64, 32], [128, 256], [3, 48], [128, 100]])
def test_blocks_of_other_sizes(block: list[int]) -> None:
    """A whole number of 16 inputs is held as it is; others are widened."""
    rows, columns = block
    n, k = 130, 400
    scales = torch.rand(-(-n // rows), -(-k // columns)) + 0.5
    codes = torch.randn(n, k).to(torch.float8_e4m3fn)
    wide = scales.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    settings = {**q.FP8_BLOCK, "weight_block_size": block}
    layer = ColumnParallelLinear(on_cpu(settings), in_features=k, outputs={"a": n})
    load(layer, {"a": {"weight": codes, "weight_scale_inv": scales}})
    expected = WidenedMethod if columns % 16 else Fp8PackedMethod
    assert type(layer.method) is expected
    x = torch.randn(3, k)
    assert error(layer(x), x.double() @ (codes.double() * wide.double()).T) < EXACT


def wrong(change: str) -> dict[Any, q.Tensors]:
    tensors, _ = made(q.fp8_block, {"a": 128}, 128)
    if change == "code":
        tensors["a"]["weight"].view(torch.uint8)[5, 7] = 0xFF
    else:
        tensors["a"]["weight_scale_inv"][0, 0] = torch.inf
    return tensors


@pytest.mark.parametrize(("change", "message"), [("code", "NaN"), ("scale", "not finite")])
def test_what_is_not_finite_is_refused(change: str, message: str) -> None:
    layer = ColumnParallelLinear(on_cpu(q.FP8_BLOCK), in_features=128, outputs={"a": 128})
    with pytest.raises(ValueError, match=message):
        load(layer, wrong(change))


def by_output(weight: torch.Tensor) -> tuple[q.Tensors, torch.Tensor]:
    """The weight as it is in the file, and what it is rounded to."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": weight}, codes.float() * scale


@pytest.mark.parametrize("model", ["llama", "qwen3_moe_narrow", "qwen3_tied"])
def test_quantized_as_it_loads(model: str, tmp_path: Path) -> None:
    files = q.write(q.random_model(model), tmp_path, by_output, {})
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = ServerArgs(model_path=str(tmp_path), quantization="fp8")
    driver = Driver(tmp_path, args=args)
    layers = driver.model.model.layers
    for layer in (layers[0].self_attn.qkv_proj, layers[1].self_attn.o_proj):
        assert (layer.weight.kind, layer.weight.group) == ("fp8", 0)
        assert layer.held_bytes() == weight_bytes(layer)
    head = driver.model.lm_head or driver.model.model.embed_tokens
    assert head.weight.kind == "dense"
    ids = random_ids(driver.config, 40, seed=3)
    logits = driver.step([(Sequence(0, ids), len(ids))])
    assert logits is not None
    assert relative_error(logits, reference_logits(files.reference, ids)) < OF_A_MODEL


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    reference = q.random_model("llama")
    with torch.no_grad():
        reference.model.layers[1].mlp.down_proj.weight[3, 5] = float("nan")
    q.save(reference, tmp_path)
    args = ServerArgs(model_path=str(tmp_path), quantization="fp8")
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.down_proj\.weight .*not finite"):
        Driver(tmp_path, args=args)


def test_a_code_that_is_no_number_is_named(tmp_path: Path) -> None:
    def quantize(weight: torch.Tensor) -> tuple[q.Tensors, torch.Tensor]:
        tensors, widened = q.fp8_block(weight)
        if weight.shape == (256, 384):
            tensors["weight"].view(torch.uint8)[3, 5] = 0x7F
        return tensors, widened

    files = q.write(q.random_model("llama"), tmp_path, quantize, q.FP8_BLOCK)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.down_proj\.weight.* NaN"):
        Driver(files.folder)
