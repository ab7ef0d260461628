"""Checkpoints whose codes a GPU multiplies by: what runs on which device, and weights held as on a
GPU, multiplied by the reference on the CPU, against transformers' float32 model of what the codes
stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import radix_kernels
from radix_kernels import _dispatch, _loader, packed_weight
from radix_kernels import decoder as records
from radix_runtime import ops
from radix_runtime.config import ServerArgs
from radix_runtime.engine.facts import weight_bytes
from radix_runtime.errors import ConfigError
from radix_runtime.layers.moe import Experts
from radix_runtime.layers.weight import WeightLayer, WeightStack
from radix_runtime.quantization import at_load, codes, dense, gguf
from radix_runtime.quantization.config import LayerKind, Target
from radix_runtime.quantization.registry import quantization_of
from tests.runtime import mxfp4_models
from tests.runtime import quantized_models as q
from tests.runtime.gguf_files import CASES, as_codes, gguf_model, write_gguf
from tests.runtime.model_steps import ThreadCommunicator, run_ranks, worst_error
from tests.runtime.tiny_models import Driver, Sequence, random_ids

torch.set_num_threads(1)
EXACT = 1e-5
CUDA = torch.device("cuda")


class LikeAGpu(Target):
    """The CPU, whose formats are held as on a GPU."""

    @property
    def is_cpu(self) -> bool:
        return False


@pytest.fixture
def held_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """Codes are a GPU's, and the reference multiplies by them; everything else is the CPU's."""
    if radix_kernels.capabilities()["backend"] != "cpu":
        pytest.skip("needs the CPU library for all but codes")
    monkeypatch.setattr(_dispatch, "_GPUS", ("cpu", "cuda", "rocm"))
    monkeypatch.setattr(_dispatch, "triton_installed", lambda: False)
    monkeypatch.setattr(ops, "has_triton", lambda: True)
    monkeypatch.setattr(packed_weight, "_HOPPER_GROUPS", ())
    monkeypatch.setattr(ops, "use_native", lambda *_, **options: None)
    before = radix_kernels.get_fallback()
    radix_kernels.set_fallback("reference")
    for method in (codes.CodesMethod, dense.Int4Method, dense.Int8Method, gguf.GgufMethod):
        monkeypatch.setattr(method, "stacks_experts", True)
    _dispatch.choose_anew()
    yield LikeAGpu(device=torch.device("cpu"), dtype=torch.float32)
    monkeypatch.undo()
    radix_kernels.set_fallback(before)


def driver_of(folder: Path, target: Target, **options: Any) -> Driver:
    """Layer by layer, as on a GPU."""
    driver = Driver(folder, target=target, backend="torch_native", **options)
    packed = [
        weight
        for module in driver.model.modules()
        for weight in vars(module).values()
        if isinstance(weight, radix_kernels.PackedWeight) and weight.kind != "dense"
    ]
    assert packed and {weight.layout for weight in packed} == {"codes"}
    return driver


Write = Callable[[Path], q.Checkpoint]


def written(model: str, quantize: Any, settings: dict[str, Any]) -> Write:
    return lambda folder: q.write(q.random_model(model), folder, quantize, settings)


def compressed(model: str, preset: str, **changes: Any) -> Write:
    return lambda folder: written(model, *q.compressed(preset, **changes))(folder)


def gptq(model: str, **changes: Any) -> Write:
    quantize = partial(q.gptq, bits=4, group=64, desc_act=changes.get("desc_act", False))
    return written(model, quantize, q.gptq_settings(4, 64, **changes))


FORMATS: dict[str, Write] = {
    "llama awq": written("llama", q.awq, q.awq_settings()),
    "llama gptq desc_act": gptq("llama", desc_act=True),
    "llama ct_w4a16": compressed("llama", "W4A16"),
    "llama ct_w4a16_asym": compressed("llama", "W4A16_ASYM"),
    "llama ct_w8a16": compressed("llama", "W8A16"),
    "qwen3_moe awq": written("qwen3_moe", q.awq, q.awq_settings()),
    "qwen3_moe gptq": gptq("qwen3_moe"),
    "qwen3_moe gptq desc_act": gptq("qwen3_moe", desc_act=True),
    "gpt-oss mxfp4": lambda folder: mxfp4_models.write(folder, 64),
}


@pytest.mark.parametrize("name", FORMATS)
def test_logits(held_as_on_a_gpu: Target, name: str, tmp_path: Path) -> None:
    made = FORMATS[name](tmp_path)
    driver = driver_of(made.folder, held_as_on_a_gpu)
    assert 0 <= worst_error(driver, made.reference, seed=1) < EXACT


@pytest.mark.parametrize("name", ["llama ct_w4a16", "qwen3_moe awq", "gpt-oss mxfp4"])
def test_two_ranks(held_as_on_a_gpu: Target, name: str, tmp_path: Path) -> None:
    made = FORMATS[name](tmp_path)

    def work(comm: ThreadCommunicator) -> float:
        driver = driver_of(made.folder, held_as_on_a_gpu, communicator=comm)
        return worst_error(driver, made.reference, seed=1)

    assert 0 <= run_ranks(2, work)[0] < EXACT


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        ("llama", ("Q4_0",)),
        ("llama", ("Q8_0", "Q4_1", "Q5_0", "Q5_1")),
        ("llama", ("Q4_K", "Q6_K", "Q5_K", "MXFP4")),
        ("qwen3moe", ("Q4_K", "Q6_K")),
        ("qwen3moe", ("MXFP4",)),
    ],
    ids=str,
)
def test_gguf(held_as_on_a_gpu: Target, model: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    case = CASES[model]
    reference = gguf_model(case)
    path = write_gguf(tmp_path / "model.gguf", case, reference, as_codes(*kinds))
    assert worst_error(driver_of(path, held_as_on_a_gpu), reference, seed=2) < EXACT


@pytest.mark.parametrize("name", ["int4", "int8"])
@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_quantized_at_load(held_as_on_a_gpu: Target, model: str, name: str, tmp_path: Path) -> None:
    """The codes are those that the CPU finds: its own way multiplies by them, x as it is."""
    q.save(q.random_model(model), tmp_path)
    args = ServerArgs(model_path=str(tmp_path), quantization=name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_dispatch, "_GPUS", ("cuda", "rocm"))
        patch.setattr(at_load.Int8AtLoad, "at_load", lambda *_: cpu_way(name))
        for method in (dense.Int4Method, dense.Int8Method):
            patch.setattr(method, "stacks_experts", False)
        _dispatch.choose_anew()
        expected = Driver(tmp_path, args=args, backend="torch_native")
        wanted = logits_of(expected)
    _dispatch.choose_anew()
    found = logits_of(driver_of(tmp_path, held_as_on_a_gpu, args=args))
    assert ((found - wanted).norm() / wanted.norm()) < EXACT


def cpu_way(name: str) -> at_load.Int8AtLoad:
    kind = at_load.Int4AtLoad if name == "int4" else at_load.Int8AtLoad
    return kind(quantizes_x=False)


def logits_of(driver: Driver) -> torch.Tensor:
    """Of one prompt."""
    ids = random_ids(driver.config, 40, seed=3)
    logits = driver.step([(Sequence(0, ids), len(ids))])
    assert logits is not None
    return logits.clone()


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it runs here."""
    monkeypatch.setattr(_dispatch, "triton_installed", lambda: True)
    monkeypatch.setattr(ops, "has_triton", lambda: True)


GPU = Target(device=CUDA, dtype=torch.bfloat16)
SETTINGS: dict[str, dict[str, Any]] = {
    "awq": q.awq_settings(),
    "gptq": q.gptq_settings(4, 64),
    "w4a16": q.compressed("W4A16")[1],
    "w8a16": q.compressed("W8A16")[1],
    "mxfp4": {"quant_method": "mxfp4"},
    "gguf": {"quant_method": "gguf", "types": {"layers.0.ffn_up": "Q4_0"}},
}


def method_of(settings: dict[str, Any], kind: LayerKind = LayerKind.LINEAR) -> Any:
    name = "layers.0.ffn_up"
    return quantization_of(None, settings, GPU).method_of(name, kind)


@pytest.mark.usefixtures("with_triton")
@pytest.mark.parametrize("name", ["awq", "gptq", "w4a16", "w8a16"])
def test_a_gpu_takes_codes(name: str) -> None:
    assert isinstance(method_of(SETTINGS[name]), codes.CodesMethod)


@pytest.mark.usefixtures("with_triton")
def test_a_gpu_takes_gguf_and_mxfp4() -> None:
    method = method_of(SETTINGS["gguf"])
    assert isinstance(method, gguf.GgufMethod) and method.form.bits == 4
    method = method_of(SETTINGS["mxfp4"], LayerKind.EXPERT)
    assert isinstance(method, codes.CodesMethod) and method.widens is None


@pytest.mark.usefixtures("with_triton")
@pytest.mark.parametrize("name", ["int4", "int8"])
def test_a_gpu_quantizes_at_load(name: str) -> None:
    method = quantization_of(name, None, GPU).method_of("layers.0.up_proj", LayerKind.LINEAR)
    assert method.kind == name and method.packs_experts


def test_without_triton_codes_are_refused_or_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch, "triton_installed", lambda: False)
    monkeypatch.setattr(ops, "has_triton", lambda: False)
    for name in ("awq", "gptq", "w4a16", "w8a16"):
        with pytest.raises(ConfigError, match=r"no kernel on cuda.* with Triton installed"):
            method_of(SETTINGS[name])
    for name in ("int4", "int8"):
        with pytest.raises(ConfigError, match=f"--quantization {name} has no kernel on cuda"):
            quantization_of(name, None, GPU)
    assert method_of(SETTINGS["gguf"]).widens == "GGUF"
    assert method_of(SETTINGS["mxfp4"], LayerKind.EXPERT).widens == "MXFP4"


def test_on_the_cpu_codes_need_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_loader, "bind", None)
    cpu = Target(device=torch.device("cpu"), dtype=torch.bfloat16)
    for name in ("int8", "int4", "fp8"):
        with pytest.raises(ConfigError, match="has no kernel on the CPU here.* radix-kernels-cpu"):
            quantization_of(name, None, cpu)
    for settings in (q.FP8_TENSOR, SETTINGS["mxfp4"]):
        method = quantization_of(None, settings, cpu).method_of("experts.0.up", LayerKind.EXPERT)
        assert method.widens is not None


@pytest.mark.usefixtures("with_triton")
def test_experts_whose_inputs_have_an_order_are_widened_on_a_gpu() -> None:
    settings = q.gptq_settings(4, 64, desc_act=True)
    assert method_of(settings).widens is None
    assert method_of(settings, LayerKind.EXPERT).widens == "GPTQ INT4"


def test_what_is_held_is_foretold(held_as_on_a_gpu: Target, tmp_path: Path) -> None:
    """For `radix doctor`."""
    for name in ("llama awq", "llama ct_w8a16", "gpt-oss mxfp4"):
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        made = FORMATS[name](folder)
        target = LikeAGpu(device=held_as_on_a_gpu.device, dtype=torch.float16)
        model = driver_of(made.folder, target, dtype=torch.float16).model
        layers = [module for module in model.modules() if isinstance(module, WeightLayer)]
        foretold = sum(layer.held_bytes() for layer in layers)
        held = sum(weight_bytes(layer) for layer in layers)
        assert 0.97 < foretold / held < 1.03, name


def test_a_stack_holds_what_is_of_one_form(held_as_on_a_gpu: Target) -> None:
    codes_of = torch.zeros(32, 32, dtype=torch.uint8)
    stack = WeightStack(3)
    held = []
    for index, zeros in enumerate((None, torch.full((32, 1), 3, dtype=torch.uint8), None)):
        scales = torch.full((32, 1), 0.5 + index)
        weight = radix_kernels.pack_weight(codes_of, scales, "int4", zeros=zeros, group=64)
        held.append(stack.put_packed("weight", index, weight))
    memory = stack.tensors["weight"]
    assert memory.shape[0] == 3
    for index in (0, 2):
        assert held[index].data.data_ptr() == memory[index].data_ptr()
        _, scales, _ = radix_kernels.unpack_weight(held[index])
        assert (scales == 0.5 + index).all()
    assert held[1].zeros
    down = torch.zeros(64, 8, dtype=torch.uint8)
    w2 = radix_kernels.pack_weight(down, torch.ones(64, 1), "int4", group=64)
    experts = radix_kernels.PackedExperts(w1=tuple(held), w2=(w2,) * 3)
    assert experts.w1[0].zeros and experts.stacks[0].shape[0] == 3


def test_products_of_heads(held_as_on_a_gpu: Target) -> None:
    """One head after the other: the CPU library multiplies by no codes."""
    rng = fresh()
    heads = radix_kernels.PackedHeads((random_codes(rng), random_codes(rng)))
    assert heads.native is None
    x = torch.randn(3, 2, 64, generator=rng)
    out = torch.full((3, 2, 32), torch.nan)
    assert radix_kernels.linear_heads(x, heads, out=out) is out
    for head, weight in enumerate(heads.weights):
        codes_of, scales, _ = radix_kernels.unpack_weight(weight)
        steps = scales.double().repeat_interleave(64 // scales.shape[1], dim=1)
        exact = x[:, head].double() @ (codes_of.double() * steps).T
        torch.testing.assert_close(out[:, head].double(), exact, rtol=EXACT, atol=EXACT)


def test_a_decoder_refuses_codes(held_as_on_a_gpu: Target) -> None:
    columns = records.Columns(buffer=0, first=0, count=64)
    rng = fresh()
    heads = radix_kernels.PackedHeads((random_codes(rng),))
    cache = torch.zeros(1, 4, 64)
    ops_of_codes = (
        records.LinearOp(x=columns, out=columns, weight=random_codes(rng)),
        records.LatentAttentionOp(
            q=columns, out=columns, cache=cache, softmax_scale=1.0, absorb=heads, values=heads
        ),
    )
    for op in ops_of_codes:
        with pytest.raises(NotImplementedError, match="that the CPU library has packed"):
            radix_kernels.Decoder([(64, "float32")], [op])


def fresh() -> torch.Generator:
    """Fresh random numbers; the seed is in the captured output of a failing test."""
    rng = torch.Generator()
    print(f"inputs: seed {rng.seed()}")
    return rng


def random_codes(rng: torch.Generator) -> ops.PackedWeight:
    """int8 [32, 64], held as on a GPU."""
    weight = radix_kernels.pack_weight(torch.randn(32, 64, generator=rng), kind="int8")
    assert weight.layout == "codes"
    return weight


def test_experts_come_into_a_stack_in_the_order_of_their_kernel(
    held_as_on_a_gpu: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[tuple[int, int], dict[str, Any]]] = []

    def in_order(weight: ops.PackedWeight, **sizes: Any) -> ops.PackedWeight:
        seen.append((weight.shape, sizes))
        bytes_ = weight.data.clone()
        bytes_[-1] = 77
        return replace(weight, data=bytes_)

    monkeypatch.setattr(ops.PackedExperts, "part", staticmethod(in_order))
    made = FORMATS["gpt-oss mxfp4"](tmp_path)
    driver = driver_of(made.folder, held_as_on_a_gpu)
    layers = [module for module in driver.model.modules() if isinstance(module, Experts)]
    assert len(seen) == sum(2 * len(layer.local) for layer in layers) > 0
    for (outputs, inputs), sizes in seen:
        hidden = sizes["hidden"]
        width = sizes["width"]
        assert (outputs, inputs) in {(2 * width, hidden), (hidden, width)}
        assert isinstance(sizes["activation"], ops.ClampedSwiGlu)
    for layer in layers:
        packed = layer.packed()
        assert packed is not None
        assert isinstance(packed.activation, ops.ClampedSwiGlu)
        assert all(weight.data[-1] == 77 for weight in (*packed.w1, *packed.w2))
