"""gpt-oss with its experts in MXFP4: logits against transformers' float32 model of what the codes
stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import radix_kernels
from radix_runtime.config import ServerArgs
from radix_runtime.device import Device, Memory
from radix_runtime.engine.facts import weight_bytes
from radix_runtime.errors import ConfigError
from radix_runtime.layers.weight import WeightLayer
from radix_runtime.model_config import ModelConfig
from radix_runtime.prepare import prepare_model
from radix_runtime.quantization import mxfp4
from radix_runtime.quantization.config import Target
from radix_runtime.quantization.dense import PlainMethod
from radix_runtime.quantization.mxfp4 import BLOCK, Mxfp4Storage
from radix_runtime.quantization.storage import WidenedMethod
from tests.runtime.command import Run
from tests.runtime.model_steps import ThreadCommunicator, run_ranks, worst_error
from tests.runtime.mxfp4_models import SETTINGS, write
from tests.runtime.quantized_models import Checkpoint
from tests.runtime.test_families import OneOfTwo, check_engine
from tests.runtime.test_loader import Rank
from tests.runtime.test_one_call import check as check_one_call
from tests.runtime.tiny_models import Driver, Sequence, random_ids, reference_logits, relative_error

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(
    radix_kernels.capabilities()["backend"] != "cpu", reason="integer codes are for the CPU"
)
EXACT = 1e-5
# Widths of experts. Two ranks: each has whole experts, half of each, half of each in mid block.
WHOLE = 32
HALVES = 64
MID_BLOCK = 96

Checkpoints = Callable[[int], Checkpoint]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Width -> the files and their reference, made once."""
    made: dict[int, Checkpoint] = {}

    def make(width: int) -> Checkpoint:
        if width not in made:
            made[width] = write(tmp_path_factory.mktemp(f"mxfp4-{width}"), width)
        return made[width]

    return make


def check(made: Checkpoint, ranks: int, **options: Any) -> None:
    def work(comm: ThreadCommunicator) -> float:
        driver = Driver(made.folder, communicator=comm, **options)  # type: ignore[arg-type]
        return worst_error(driver, made.reference, seed=1)

    error = run_ranks(ranks, work)[0]
    print(f"{error:.1e}")
    assert 0 < error < EXACT


def experts_of(driver: Driver, layer: int = 0) -> Any:
    return driver.model.model.layers[layer].mlp.experts


def test_transformers_reads_the_same_files(checkpoint: Checkpoints) -> None:
    """The names are those that it looks for, and it widens the codes to the reference's weights."""
    made = checkpoint(HALVES)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        made.folder,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    expected = made.reference.state_dict()
    found = model.state_dict()
    assert set(found) == set(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("width", [WHOLE, HALVES])
def test_logits(checkpoint: Checkpoints, width: int, ranks: int) -> None:
    check(checkpoint(width), ranks)


@pytest.mark.parametrize(("width", "count"), [(WHOLE, 3), (HALVES, 6), (MID_BLOCK, 3)])
def test_ranks_share_experts_at_whole_blocks(
    checkpoint: Checkpoints, width: int, count: int
) -> None:
    experts = experts_of(Driver(checkpoint(width).folder, communicator=Rank(1, 2)))
    assert len(experts) == count
    inputs = width if count == 3 else width // 2
    assert {expert.down_proj.shape.in_features for expert in experts.values()} == {inputs}


@pytest.mark.parametrize("width", [WHOLE, HALVES])
def test_one_call_has_the_bits_of_the_modules(checkpoint: Checkpoints, width: int) -> None:
    driver = Driver(checkpoint(width).folder, dtype=torch.bfloat16)
    assert driver.model.model._cpu_decoder.applies_to(driver.pool)
    check_one_call(driver)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_engine(checkpoint: Checkpoints, ranks: int) -> None:
    made = checkpoint(HALVES)
    check_engine(made.folder, made.reference, tp_size=ranks, num_threads=ranks)


def test_settings_of_the_model_can_be_overridden(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = checkpoint(WHOLE)
    for layer in made.reference.model.layers:
        monkeypatch.setattr(layer.mlp.router, "top_k", 1)
    overrides = '{"num_experts_per_tok": 1}'
    check_engine(made.folder, made.reference, num_threads=1, json_model_override_args=overrides)
    others = '{"quantization_config": null}'
    assert ModelConfig.from_dir(made.folder, others).quantization is None


def by_definition(byte: int, exponent: int) -> tuple[float, float]:
    """The two weights of a byte, by the OCP's definition of e2m1 and e8m0."""

    def float_of(code: int) -> float:
        power = code >> 1 & 3
        fraction = code & 1
        value = fraction / 2 if power == 0 else 2.0 ** (power - 1) * (1 + fraction / 2)
        return -value if code & 8 else value

    scale = 2.0 ** (exponent - 127)
    return float_of(byte & 15) * scale, float_of(byte >> 4) * scale


def test_every_code_with_every_power() -> None:
    """But for the largest, with which 6 is no float32."""
    exponents = range(253)
    blocks = torch.arange(256, dtype=torch.uint8).repeat(len(exponents), 1)
    scales = torch.tensor(exponents, dtype=torch.uint8)[:, None].repeat(1, 512 // BLOCK)
    layer = SimpleNamespace(
        blocks=blocks,
        scales=scales,
        shape=SimpleNamespace(inputs=SimpleNamespace(first=0, size=512)),
    )
    rows = [
        [value for byte in range(256) for value in by_definition(byte, exponent)]
        for exponent in exponents
    ]
    expected = torch.tensor(rows, dtype=torch.float64)
    assert torch.equal(Mxfp4Storage().weight(layer, torch.float32).double(), expected)
    codes = Mxfp4Storage().codes(layer)
    held = codes.w.double() * codes.scales.double().repeat_interleave(codes.group, 1)
    assert torch.equal(held, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_weight_keeps_its_value(checkpoint: Checkpoints, dtype: torch.dtype) -> None:
    made = checkpoint(HALVES)
    experts = experts_of(Driver(made.folder, dtype=dtype), layer=2)
    source = made.reference.model.layers[2].mlp.experts
    for number, expert in experts.items():
        gate_up = source.gate_up_proj[int(number)].T
        down = source.down_proj[int(number)].T
        expected = torch.cat((gate_up[::2], gate_up[1::2]))
        assert torch.equal(unpacked(expert.gate_up_proj), expected)
        assert torch.equal(unpacked(expert.down_proj), down)


def unpacked(layer: Any) -> torch.Tensor:
    """What is held: integers in float32, the floats of the file otherwise."""
    codes, scales, _ = radix_kernels.unpack_weight(layer.weight)
    if layer.compute_dtype == torch.float32:
        assert layer.weight.kind == "int8"
        return codes.float() * scales.float().repeat_interleave(BLOCK, 1)
    assert layer.weight.kind == "mxfp4"
    loaded = SimpleNamespace(blocks=codes, scales=scales, shape=layer.shape)
    return Mxfp4Storage().weight(loaded, torch.float32)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
def test_a_product(checkpoint: Checkpoints, dtype: torch.dtype, rounding: float) -> None:
    """Against float64, of x in 8 bits where it is rounded."""
    layer = experts_of(Driver(checkpoint(HALVES).folder, dtype=dtype))["1"].down_proj
    x = torch.randn(7, layer.shape.in_features).to(dtype)
    bias = torch.randn(layer.shape.out_features).to(dtype)
    residual = torch.randn(7, layer.shape.out_features).to(dtype)
    taken = x.double()
    if dtype != torch.float32:
        codes, scales = radix_kernels.reference.quantize_rows(x, BLOCK)
        taken = radix_kernels.reference.dequantize_weight(codes, scales, None, BLOCK)
    exact = taken @ unpacked(layer).double().T + bias.double()
    wide = layer.method.apply(layer, x, bias=bias, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert relative_error(wide.double(), exact) < 1e-6
    found = layer.method.apply(layer, x, bias=bias, residual=residual.clone())
    assert found.dtype == dtype
    assert relative_error(found.double(), exact + residual.double()) < rounding


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 0.05), (torch.bfloat16, 0.15)])
def test_16_bits(checkpoint: Checkpoints, dtype: torch.dtype, bound: float) -> None:
    """The median of the errors of tokens: near ties of a router choose other experts. x has 8
    bits."""
    made = checkpoint(HALVES)
    driver = Driver(made.folder, dtype=dtype)
    ids = random_ids(driver.config, 50, seed=2)
    logits = driver.step([(Sequence(0, ids), len(ids))])
    assert logits is not None
    expected = reference_logits(made.reference, ids)
    error = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert 1e-5 < float(error.median()) < bound


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Target:
    """A GPU that multiplies no MXFP4."""
    monkeypatch.setattr("radix_runtime.quantization.mxfp4.has_kernel", lambda *_: False)
    return Target(device=torch.device("cuda"), dtype=torch.float32)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("width", [HALVES, MID_BLOCK])
def test_without_a_kernel_they_are_widened(
    checkpoint: Checkpoints,
    width: int,
    ranks: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then ranks may share an expert in mid block."""
    monkeypatch.setattr(mxfp4, "has_kernel", lambda *_: False)
    caplog.set_level("INFO")
    gpu = without_kernels(monkeypatch)
    check(checkpoint(width), ranks, target=gpu)
    told = [text for text in caplog.messages if "widened" in text]
    assert len(told) == 1
    assert re.match(r"MXFP4 weights are widened to float32 as they load, for want of", told[0])
    cut = Driver(checkpoint(width).folder, communicator=Rank(1, 2), target=gpu)
    assert experts_of(cut)["5"].down_proj.shape.in_features == width // 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_widened_experts_in_one_tensor(
    checkpoint: Checkpoints, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU without a kernel has them; ranks share an expert in mid block, and one of them adds
    its bias."""
    monkeypatch.setattr(mxfp4, "has_kernel", lambda *_: False)
    monkeypatch.setattr(WidenedMethod, "stacks_experts", True)
    monkeypatch.setattr(WidenedMethod, "keep", PlainMethod.keep)
    gpu = without_kernels(monkeypatch)
    check(checkpoint(MID_BLOCK), ranks, target=gpu)


@pytest.mark.parametrize(
    ("entry", "left_out"),
    [
        ("model.layers.1.mlp.experts", ("model.layers.1",)),
        ("model.layers.*.mlp", tuple(f"model.layers.{i}" for i in range(4))),
    ],
)
def test_layers_that_are_left_out(entry: str, left_out: tuple[str, ...], tmp_path: Path) -> None:
    settings = {**SETTINGS, "modules_to_not_convert": [entry, "lm_head"]}
    made = write(tmp_path, HALVES, settings, left_out=left_out)
    check(made, 1)
    driver = Driver(made.folder)
    kinds = [experts_of(driver, layer)["0"].down_proj.weight.kind for layer in range(4)]
    assert kinds == [
        "dense" if f"model.layers.{layer}" in left_out else "int8" for layer in range(4)
    ]


def test_dummy_weights(checkpoint: Checkpoints) -> None:
    """Random codes, with which activations stay of the size that they have."""
    made = checkpoint(HALVES)
    args = ServerArgs(model_path=str(made.folder), load_format="dummy")
    driver = Driver(made.folder, args=args, communicator=OneOfTwo())
    logits = driver.step([(Sequence(0, list(range(20))), 20)])
    assert logits is not None and bool(logits.isfinite().all())
    weight = unpacked(experts_of(driver)["0"].gate_up_proj)
    assert 0.015 < float(weight.std()) < 0.03


def test_nothing_but_packed_weights_stays(checkpoint: Checkpoints) -> None:
    driver = Driver(checkpoint(HALVES).folder)
    left = {name for name, param in driver.model.named_parameters() if param.dim() > 1}
    assert left == {"model.embed_tokens.weight"}


def test_what_is_held_is_foretold(checkpoint: Checkpoints) -> None:
    model = Driver(checkpoint(HALVES).folder, dtype=torch.bfloat16).model
    layers = [module for module in model.modules() if isinstance(module, WeightLayer)]
    experts = [layer for layer in layers if ".experts." in layer.shape.name]
    assert len(experts) == 4 * 6 * 2
    assert all(layer.held_bytes() == weight_bytes(layer) for layer in experts)


def test_doctor_reads_the_headers(checkpoint: Checkpoints, here: Run) -> None:
    done = here("doctor", str(checkpoint(HALVES).folder), "--device", "cpu", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stdout
    assert re.search(r"format +mxfp4, computed in bfloat16", done.stdout)


# The configuration of gpt-oss-20b as it is published, which names no type of its floats.
PUBLISHED = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
    "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
    "quantization_config": SETTINGS, "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                     "original_max_position_embeddings": 4096, "rope_type": "yarn",
                     "truncate": False},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
    "swiglu_limit": 7.0, "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0",
    "use_cache": True, "vocab_size": 201088,
}  # fmt: skip


def test_the_published_configuration(
    here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(available=64 << 30, total=64 << 30)
    monkeypatch.setattr(Device, "memory", lambda self: memory)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PUBLISHED))
    done = here("doctor", str(file), "--device", "cpu")
    assert done.returncode == 0, done.stdout
    rows = dict(line.strip().partition("  ")[::2] for line in done.stdout.splitlines())
    assert "unknown keys" not in rows
    assert rows["format"].strip() == "mxfp4, computed in bfloat16"
    assert rows["parameters"].strip().startswith("20.9 B")
    assert re.match(
        r"TP 1 12\.\d+ GiB, TP 2 6\.\d+ GiB, TP 4 3\.", rows["weights of a rank"].strip()
    )


def test_the_flag_may_name_the_format_of_the_checkpoint(checkpoint: Checkpoints) -> None:
    folder = str(checkpoint(HALVES).folder)
    for name in ("mxfp4", None):
        prepared = prepare_model(ServerArgs(model_path=folder, quantization=name))
        assert prepared.args.quantization == "mxfp4"
    with pytest.raises(ConfigError, match=r"--quantization int8: .* quantized already \(mxfp4\)"):
        prepare_model(ServerArgs(model_path=folder, quantization="int8"))
