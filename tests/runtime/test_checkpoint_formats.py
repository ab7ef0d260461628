"""Quantized checkpoints on the CPU: logits against transformers' float32 model of what the codes
stand for."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import radix_kernels
from radix_runtime import Engine
from radix_runtime.config import ServerArgs
from radix_runtime.engine.facts import weight_bytes
from radix_runtime.errors import ConfigError
from radix_runtime.layers.weight import WeightLayer
from tests.runtime import quantized_models as q
from tests.runtime.model_steps import ThreadCommunicator, run_ranks, worst_error
from tests.runtime.test_loader import Rank
from tests.runtime.tiny_models import Driver, Sequence, random_ids, reference_logits, relative_error

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(
    radix_kernels.capabilities()["backend"] != "cpu", reason="integer codes are for the CPU"
)
EXACT = 1e-5  # of weights that are multiplied by x as it is
QUANTIZED_X = 6e-2  # of x in 8 bits

Format = tuple[Any, dict[str, Any], float]


def formats() -> dict[str, Callable[[], Format]]:
    """name -> (how a weight is quantized, the configuration, the largest relative error)."""

    def by_preset(preset: str, bound: float, **changes: Any) -> Format:
        quantize, settings = q.compressed(preset, **changes)
        return quantize, settings, bound

    def gptq(bits: int = 4, group: int = 64, **changes: Any) -> Format:
        form = changes.get("checkpoint_format", "gptq")
        desc_act = changes.get("desc_act", False)
        quantize = partial(q.gptq, bits=bits, group=group, desc_act=desc_act, form=form)
        return quantize, q.gptq_settings(bits, group, **changes), EXACT

    return {
        "fp8_block": lambda: (q.fp8_block, q.FP8_BLOCK, EXACT),
        "fp8_block_ue8m0": lambda: (
            q.fp8_block_ue8m0, {**q.FP8_BLOCK, "scale_fmt": "ue8m0"}, EXACT,
        ),
        "fp8_tensor": lambda: (q.fp8_tensor, q.FP8_TENSOR, EXACT),
        "ct_fp8_static": lambda: by_preset("FP8", EXACT),
        "ct_fp8_channel": lambda: by_preset("FP8_DYNAMIC", EXACT),
        "ct_fp8_block": lambda: by_preset("FP8_BLOCK", EXACT),
        "ct_w8a8": lambda: by_preset("W8A8", QUANTIZED_X),
        "ct_w4a16": lambda: by_preset("W4A16", EXACT),
        "ct_w4a16_64": lambda: by_preset("W4A16", EXACT, group_size=64),
        "ct_w4a16_channel": lambda: by_preset(
            "W4A16", EXACT, strategy="channel", group_size=None
        ),
        "ct_w4a16_asym": lambda: by_preset("W4A16_ASYM", EXACT),
        "ct_w8a16": lambda: by_preset("W8A16", EXACT),
        "awq": lambda: (q.awq, q.awq_settings(), EXACT),
        "awq_rows": lambda: (partial(q.awq, group=-1), q.awq_settings(-1), EXACT),
        "gptq": gptq,
        "gptq_v2": lambda: gptq(checkpoint_format="gptq_v2"),
        "gptq_128": lambda: gptq(group=128),
        "gptq_rows": lambda: gptq(group=-1),
        "gptq_8": lambda: gptq(bits=8),
        "gptq_desc_act": lambda: gptq(desc_act=True),
        "gptq_8_desc_act": lambda: gptq(bits=8, group=128, desc_act=True),
    }  # fmt: skip


FORMATS = formats()
# Of sizes that are no multiples of 128, which transformers and compressed-tensors do not write.
ODD_BLOCKS: dict[str, Any] = {
    "fp8_block": q.fp8_odd_block,
    "fp8_block_ue8m0": partial(q.fp8_odd_block, powers=True),
    "ct_fp8_block": partial(q.fp8_odd_block, name="weight_scale"),
}
Checkpoints = Callable[[str, str], q.Checkpoint]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """(model, format) -> the files and their reference, made once."""
    made: dict[tuple[str, str], q.Checkpoint] = {}

    def make(model: str, form: str) -> q.Checkpoint:
        if (model, form) not in made:
            quantize, settings, _ = FORMATS[form]()
            if model == "deepseek_v3":
                quantize = ODD_BLOCKS.get(form, quantize)
            folder = tmp_path_factory.mktemp(f"{model}-{form}")
            made[model, form] = q.write(q.random_model(model), folder, quantize, settings)
        return made[model, form]

    return make


def check(driver: Driver, made: q.Checkpoint, bound: float) -> None:
    if bound == EXACT:
        assert 0 <= worst_error(driver, made.reference, seed=1) < EXACT
        return
    ids = random_ids(driver.config, 60, seed=2)
    logits = driver.step([(Sequence(0, ids), len(ids))])
    if logits is not None:
        assert EXACT < relative_error(logits, reference_logits(made.reference, ids)) < bound


# Of the experts, and of ranks, one format of each kind; all of them with RADIX_TEST_FULL=1.
FULL = bool(os.environ.get("RADIX_TEST_FULL"))
MODELS = ("llama", "qwen3_moe", "deepseek_v3")
SOME = ["fp8_block", "ct_fp8_channel", "ct_w8a8", "ct_w4a16_asym", "awq", "gptq_desc_act"]


def cases(*others: tuple[str, str]) -> list[tuple[str, str]]:
    """(model, format)."""
    if FULL:
        return [(model, form) for model in MODELS for form in FORMATS]
    return [*others, *((model, form) for model in MODELS[1:] for form in SOME)]


@pytest.mark.parametrize(("model", "form"), cases(*(("llama", form) for form in FORMATS)))
def test_logits(checkpoint: Checkpoints, model: str, form: str) -> None:
    made = checkpoint(model, form)
    check(Driver(made.folder), made, FORMATS[form]()[2])


@pytest.mark.parametrize(
    ("model", "form"), cases(("llama", "ct_w4a16"), ("llama", "gptq_128"), ("llama", "fp8_tensor"))
)
def test_two_ranks(checkpoint: Checkpoints, model: str, form: str) -> None:
    made = checkpoint(model, form)

    def work(comm: ThreadCommunicator) -> None:
        driver = Driver(made.folder, communicator=comm)
        check(driver, made, FORMATS[form]()[2])

    run_ranks(2, work)


@pytest.mark.parametrize("form", ["fp8_block", "fp8_tensor", "ct_w4a16_64", "awq", "gptq_desc_act"])
def test_products_in_one_tensor(checkpoint: Checkpoints, form: str) -> None:
    """Phi's q, k and v, and gate and up: their scales are split with them."""
    made = checkpoint("phi3", form)
    check(Driver(made.folder), made, EXACT)


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_that_end_inside_of_heads(ranks: int, tmp_path: Path) -> None:
    made = q.write(q.random_model("llama_odd_heads"), tmp_path, q.fp8_odd_block, q.FP8_BLOCK)

    def work(comm: ThreadCommunicator) -> None:
        driver = Driver(made.folder, communicator=comm)
        check(driver, made, EXACT)

    run_ranks(ranks, work)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", ["ct_w4a16_64", "fp8_block", "gptq"])
def test_a_tied_head_keeps_its_type(checkpoint: Checkpoints, form: str, ranks: int) -> None:
    """The list of what is left out names `lm_head`, which the file has not."""
    made = checkpoint("qwen3_tied", form)

    def work(comm: ThreadCommunicator) -> None:
        driver = Driver(made.folder, communicator=comm)
        assert driver.model.head.weight.kind == "dense"
        check(driver, made, EXACT)

    run_ranks(ranks, work)


class Rounded:
    """x of a transformers layer in 8 bits, a scale for each token."""

    def __call__(self, module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        x = inputs[0]
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (torch.round(x / scale) * scale,)


def test_w8a8_quantizes_x_by_token(checkpoint: Checkpoints) -> None:
    """Against transformers with x rounded alike: few values lie on a border between two codes."""
    made = checkpoint("llama", "ct_w8a8")
    hooks = [
        module.register_forward_pre_hook(Rounded())
        for name, module in made.reference.named_modules()
        if name.endswith("_proj")
    ]
    driver = Driver(made.folder)
    ids = random_ids(driver.config, 60, seed=2)
    try:
        expected = reference_logits(made.reference, ids)
    finally:
        for hook in hooks:
            hook.remove()
    logits = driver.step([(Sequence(0, ids), len(ids))])
    assert logits is not None and relative_error(logits, expected) < 2e-3


def mixed(tmp_path: Path, **changes: Any) -> q.Checkpoint:
    """INT4 MLPs, INT8 attention with x in 8 bits but for its output, and one layer left out."""
    small, settings = q.compressed("W4A16", group_size=64)
    large, others = q.compressed("W8A8")
    small_group = settings["config_groups"]["group_0"]
    large_group = others["config_groups"]["group_0"]
    small_group |= {"targets": ["re:.*mlp.*"], "format": "pack-quantized"}
    large_group |= {"targets": ["Linear"], "format": "int-quantized", "input_activations": None}
    settings["config_groups"] = {"group_0": large_group, "group_1": small_group}
    settings["ignore"] = ["lm_head", "re:.*self_attn.o_proj$", "model.layers.1.mlp.down_proj"]
    settings["format"] = "mixed-precision"
    settings |= changes

    def by_name(key: str) -> q.Quantize:
        return small if ".mlp." in key else large

    products = r"layers\.\d\.(self_attn\.[qkv]|mlp\.(gate|up))_proj|layers\.0\.mlp\.down_proj"
    model = q.random_model("llama")
    return q.write(model, tmp_path, by_name, settings, products=products, by_name=True)


def test_formats_by_the_names_of_layers(tmp_path: Path) -> None:
    made = mixed(tmp_path)
    driver = Driver(made.folder)
    check(driver, made, EXACT)
    layers = driver.model.model.layers
    kinds = [
        (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.down_proj) for layer in layers
    ]
    found = [[module.weight.kind for module in modules] for modules in kinds]
    assert found == [["int8", "dense", "int4"], ["int8", "dense", "dense"]]


@pytest.mark.parametrize("form", ["fp8_block", "ct_w4a16_64"])
def test_lists_have_the_names_of_the_checkpoint(form: str, tmp_path: Path) -> None:
    """Mixtral's experts have other names in the model."""
    quantize, settings, _ = FORMATS[form]()
    left_out = "model.layers.1.block_sparse_moe.experts.2"
    key = "ignore" if "ignore" in settings else "modules_to_not_convert"
    settings = {**settings, key: ["lm_head", f"re:{left_out}.*"]}
    products = r"layers\.\d\.(self_attn\..*_proj|block_sparse_moe\.experts\.\d\.w\d)\.weight$"
    products = rf"^(?!{left_out}).*{products}"
    made = q.write(q.random_model("mixtral"), tmp_path, quantize, settings, products=products)
    driver = Driver(made.folder)
    check(driver, made, EXACT)
    experts = driver.model.model.layers[1].mlp.experts
    kinds = [type(expert.down_proj.method).__name__ for expert in experts.values()]
    assert kinds[0] == kinds[1] and kinds[2] == "DenseMethod" != kinds[0]


def test_fp8_as_minimax_m2_names_it(tmp_path: Path) -> None:
    """Its list of what is left out names the router, `gate`; the experts' gates are FP8."""
    quantize, settings, _ = FORMATS["fp8_block"]()
    left_out = ["gate", "e_score_correction_bias", "lm_head"]
    settings = {**settings, "fmt": "float8_e4m3fn", "modules_to_not_convert": left_out}
    products = r"layers\.\d\.(self_attn\..*_proj|(block_sparse_moe|mlp)\.experts\.\d\.w\d)\.weight$"
    made = q.write(q.random_model("minimax_m2"), tmp_path, quantize, settings, products=products)
    driver = Driver(made.folder)
    check(driver, made, EXACT)
    experts = driver.model.model.layers[0].mlp.experts.values()
    assert all(expert.gate_up_proj.weight.kind == "fp8" for expert in experts)


def test_parts_of_several_formats_are_refused(tmp_path: Path) -> None:
    made = mixed(tmp_path, ignore=["lm_head", "model.layers.0.self_attn.k_proj"])
    message = r"layers\.0\.self_attn\.q_proj and .*k_proj differ"
    with pytest.raises(ConfigError, match=message):
        Driver(made.folder)


def test_widening_is_told_once(checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    made = checkpoint("llama", "gptq_desc_act")
    caplog.set_level("INFO")
    for rank in (0, 1):
        Driver(made.folder, dtype=torch.bfloat16, communicator=Rank(rank, 2))
    told = [text for text in caplog.messages if "widened" in text]
    assert len(told) == 1
    assert re.fullmatch(
        r"GPTQ INT4 weights are widened to bfloat16 as they load, for want of a kernel: "
        r"0\.000\d+ GB become 0\.000\d+ GB",
        told[0],
    )


@pytest.mark.parametrize("form", [form for form in FORMATS if "fp8" in form])
def test_fp8_is_held_as_it_is(
    checkpoint: Checkpoints, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    driver = Driver(checkpoint("qwen3_moe", form).folder, dtype=torch.bfloat16)
    assert not [text for text in caplog.messages if "widened" in text]
    products = [
        module
        for module in driver.model.modules()
        if isinstance(module, WeightLayer) and module.method.packed_weight(module) is not None
    ]
    held = [layer for layer in products if layer.weight.kind == "fp8"]
    assert len(held) == len(products) - 3  # two routers, the head
    assert all(layer.held_bytes() == weight_bytes(layer) for layer in held)


@pytest.mark.parametrize("form", FORMATS)
def test_dummy_weights(checkpoint: Checkpoints, form: str) -> None:
    """Random codes, and scales with which activations stay of the size that they have."""
    made = checkpoint("qwen3_moe", form)
    args = ServerArgs(model_path=str(made.folder), load_format="dummy")
    driver = Driver(made.folder, args=args)
    ids = random_ids(driver.config, 20, seed=4)
    logits = driver.step([(Sequence(0, ids), len(ids))])
    assert logits is not None and bool(logits.isfinite().all())
    assert 0.01 < float(logits.std()) < 100
    product = driver.model.model.layers[0].self_attn.o_proj
    weight = product.method.apply(product, torch.eye(256))
    assert 0.01 < float(weight.std()) < 0.04


@pytest.mark.parametrize("form", ["fp8_block", "ct_w4a16_64", "gptq_desc_act", "awq", "ct_w8a8"])
def test_nothing_but_packed_weights_stays(checkpoint: Checkpoints, form: str) -> None:
    driver = Driver(checkpoint("qwen3_moe", form).folder)
    left = {name: p for name, p in driver.model.named_parameters() if p.dim() > 1}
    assert set(left) == {"model.embed_tokens.weight"}
    orders = [name for name, p in driver.model.named_parameters() if name.endswith(".order")]
    assert bool(orders) == (form == "gptq_desc_act")


@pytest.mark.parametrize("form", ["fp8_block", "gptq", "gptq_desc_act", "awq", "ct_w8a8"])
def test_what_is_held_is_foretold(checkpoint: Checkpoints, form: str) -> None:
    """For `radix doctor`, of files whose scales have 16 bits or are few."""
    model = Driver(checkpoint("llama", form).folder, dtype=torch.float16).model
    layers = [module for module in model.modules() if isinstance(module, WeightLayer)]
    foretold = sum(layer.held_bytes() for layer in layers)
    held = sum(weight_bytes(layer) for layer in layers)
    assert 0.97 < foretold / held < 1.03


def test_the_flag_may_name_the_format_of_the_checkpoint(checkpoint: Checkpoints) -> None:
    made = checkpoint("llama", "awq")
    folder = str(made.folder)
    Driver(made.folder, args=ServerArgs(model_path=folder, quantization="awq"))
    with pytest.raises(ConfigError, match=r"--quantization int4: .* quantized already \(awq\)"):
        Driver(made.folder, args=ServerArgs(model_path=folder, quantization="int4"))


def test_a_format_of_checkpoints_does_not_quantize(tmp_path: Path) -> None:
    q.save(q.random_model("llama"), tmp_path)
    args = ServerArgs(model_path=str(tmp_path), quantization="gptq")
    with pytest.raises(ConfigError, match="--quantization gptq: the checkpoint is not quantized"):
        Driver(tmp_path, args=args)


@pytest.mark.parametrize("ranks", [2, 4] if FULL else [4])
def test_experts_of_width_768_on_ranks(ranks: int, tmp_path: Path) -> None:
    """Qwen3-30B-A3B's FP8: on four ranks 192 of the width of each expert, one and a half blocks.
    The tokens are those of one rank."""
    made = q.write(q.random_model("qwen3_moe_768"), tmp_path, q.fp8_block, q.FP8_BLOCK)
    prompts = [[3, 4, 5], list(range(60, 100)), [7]]
    params = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    found = []
    for tp_size in (1, ranks):
        options = {"tp_size": tp_size, "num_threads": 2, "max_total_tokens": 512}
        with Engine(
            str(made.folder), skip_tokenizer_init=True, device="cpu", dtype="float32", **options
        ) as engine:
            outputs = engine.generate(input_ids=prompts, sampling_params=params)
        found.append([output["output_ids"] for output in outputs])
    assert found[0] == found[1]
    for prompt, tokens in zip(prompts, found[0], strict=True):
        logits = reference_logits(made.reference, prompt + tokens)[len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_that_autogptq_adds(value: float, checkpoint: Checkpoints, tmp_path: Path) -> None:
    """They are passed over, unless there is something in them."""
    made = checkpoint("llama", "gptq")
    tensors = load_file(made.folder / "model.safetensors")
    for key in [key for key in tensors if key.endswith(".qweight")]:
        outputs = tensors[key].shape[1]
        tensors[key.replace("qweight", "bias")] = torch.full((outputs,), value)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((made.folder / "config.json").read_bytes())
    if value:
        with pytest.raises(ConfigError, match=r"_proj\.bias has no place .* is not 0"):
            Driver(tmp_path)
    else:
        check(Driver(tmp_path), made, EXACT)
