"""Quantized checkpoints that are broken, or disagree with their configuration: one line that names
the file and the tensor, before the server starts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import radix_kernels
from radix_runtime.config import ServerArgs
from radix_runtime.errors import ConfigError
from radix_runtime.prepare import prepare_model
from tests.child import IMPORT_PATH
from tests.runtime import quantized_models as q
from tests.runtime.tiny_models import Driver

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(
    radix_kernels.capabilities()["backend"] != "cpu", reason="integer codes are for the CPU"
)
FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "float": (lambda weight: ({"weight": weight}, weight), {}),
    "fp8": (q.fp8_block, q.FP8_BLOCK),
    "awq": (q.awq, q.awq_settings()),
    "gptq": (q.gptq, q.gptq_settings()),
    "desc_act": (partial(q.gptq, desc_act=True), q.gptq_settings(desc_act=True)),
    "gptq_8": (partial(q.gptq, bits=8), q.gptq_settings(bits=8)),
    "w4a16": (None, {"group_size": 64}),
    "w4a16_8": (None, {"group_size": 8}),
}
Q0 = "model.layers.0.self_attn.q_proj"
K1 = "model.layers.1.self_attn.k_proj"
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(form: str) -> Path:
        if form not in made:
            quantize, settings = FORMATS[form]
            if quantize is None:
                quantize, settings = q.compressed("W4A16", **settings)
            folder = tmp_path_factory.mktemp(form)
            q.write(q.random_model("llama"), folder, quantize, settings)
            made[form] = folder
        return made[form]

    return make


@dataclass(frozen=True)
class Bad:
    """`tensors` and `settings` change those of a good checkpoint in `form`; `file` writes its bytes
    anew. `message`: a part of what is said."""

    name: str
    form: str
    message: str
    tensors: Callable[[q.Tensors], Any] | None = None
    settings: dict[str, Any] | None = None
    file: Callable[[bytes], bytes] | None = None


def case(name: str, form: str, message: str, **changes: Any) -> Bad:
    return Bad(name=name, form=form, message=message, **changes)


def without(*keys: str) -> Callable[[q.Tensors], Any]:
    return lambda tensors: [tensors.pop(key) for key in keys] and None


def replaced(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    return lambda tensors: tensors.update({key: change(tensors[key]).contiguous()})


def added(key: str, value: torch.Tensor) -> Callable[..., None]:
    return lambda tensors: tensors.update({key: value})


def with_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """The file with a header that lies."""

    def apply(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + size :]

    return apply


def beyond_the_end(header: dict[str, Any]) -> None:
    last = max(
        (h for k, h in header.items() if k != "__metadata__"), key=lambda h: h["data_offsets"]
    )
    last["data_offsets"][1] += 4096


def larger_shape(header: dict[str, Any]) -> None:
    header[f"{Q0}.weight"]["shape"][0] *= 2


def overlapping(header: dict[str, Any]) -> None:
    header[f"{Q0}.weight"]["data_offsets"] = header[f"{K1}.weight"]["data_offsets"]


def unknown_type(header: dict[str, Any]) -> None:
    header[f"{Q0}.weight"]["dtype"] = "F3"


GROUP = "config_groups"
BAD: list[Bad] = [
    case("an empty file", "fp8", "cannot be read", file=lambda data: b""),
    case("a header cut short", "fp8", "cannot be read", file=lambda data: data[:100]),
    case("data cut short", "fp8", "cannot be read", file=lambda data: data[:-5]),
    case("a header longer than the file", "fp8", "cannot be read",
        file=lambda data: (1 << 40).to_bytes(8, "little") + data[8:]),
    case("a header that is no JSON", "fp8", "cannot be read",
        file=lambda data: data[:8] + b"x" * (len(data) - 8)),
    case("a tensor beyond the end", "fp8", "cannot be read", file=with_header(beyond_the_end)),
    case("a shape that its bytes are not", "fp8", "cannot be read", file=with_header(larger_shape)),
    case("tensors over one another", "fp8", "cannot be read", file=with_header(overlapping)),
    case("an unknown type", "fp8", "cannot be read", file=with_header(unknown_type)),
    case("a weight that is missing", "fp8", f"no tensor for {Q0}.weight",
        tensors=without(f"{Q0}.weight")),
    case("a scale that is missing", "fp8", f"no tensor for {K1}.weight_scale_inv",
        tensors=without(f"{K1}.weight_scale_inv")),
    case("zero points that are missing", "awq", f"no tensor for {Q0}.qzeros",
        tensors=without(f"{Q0}.qzeros")),
    case("a scale too many", "fp8", "lm_head.weight_scale_inv has no place in this model",
        tensors=added("lm_head.weight_scale_inv", torch.ones(2, 2))),
    case("a bias too many", "awq", f"{DOWN}.bias has no place in this model",
        tensors=added(f"{DOWN}.bias", torch.zeros(256))),
    case("scales of other blocks", "fp8",
        f"{Q0}.weight_scale_inv has shape [4, 4], expected [2, 2]",
        tensors=added(f"{Q0}.weight_scale_inv", torch.ones(4, 4))),
    case("a scale for each output", "fp8",
        f"{Q0}.weight_scale_inv has shape [256, 1], expected [2, 2]",
        tensors=added(f"{Q0}.weight_scale_inv", torch.ones(256, 1))),
    case("scales that are integers", "fp8", f"{Q0}.weight_scale_inv holds int32, expected float32",
        tensors=added(f"{Q0}.weight_scale_inv", torch.ones(2, 2, dtype=torch.int32))),
    case("a scale that is not a number", "fp8", f"{Q0}",
        tensors=replaced(f"{Q0}.weight_scale_inv", lambda scale: scale * float("nan"))),
    case("a part in another format", "fp8", f"{K1}.weight holds bfloat16, expected float8_e4m3fn",
        tensors=replaced(f"{K1}.weight", lambda weight: weight.to(torch.bfloat16))),
    case("FP8 of another kind", "fp8", f"{Q0}.weight holds float8_e5m2, expected float8_e4m3fn",
        tensors=replaced(f"{Q0}.weight", lambda weight: weight.float().to(torch.float8_e5m2))),
    case("FP8 without a configuration", "fp8", "holds float8_e4m3fn, expected float32",
        settings={}),
    case("a configuration without FP8", "float", "holds float32, expected float8_e4m3fn",
        settings=q.FP8_BLOCK),
    case("codes of another width", "w4a16", "weight_packed has shape [256, 64], expected [256, 32]",
        tensors=added(f"{Q0}.weight_packed", torch.zeros(256, 64, dtype=torch.int32))),
    case("codes of another type", "awq", f"{Q0}.qweight ([256, 32] in the file) holds int64",
        tensors=replaced(f"{Q0}.qweight", lambda words: words.long())),
    case("groups of another size", "gptq",
        "([6, 32] in the file) has shape [32, 6], expected [32, 3]",
        settings=q.gptq_settings(group=128)),
    case("words of other bits", "gptq", "has shape [256, 48], expected [256, 96]",
        settings=q.gptq_settings(bits=8)),
    case("an order that is not announced", "desc_act", "inputs out of order",
        settings=q.gptq_settings(desc_act=False)),
    case("groups that are not there", "gptq", f"{DOWN}.scales has inputs of groups that are none",
        tensors=replaced(f"{DOWN}.g_idx", lambda groups: groups + 100)),
    case("groups of unequal sizes", "desc_act", "groups that are not of 64 inputs each",
        tensors=replaced(f"{DOWN}.g_idx", lambda groups: groups.clamp(max=2))),
    case("another order in a part", "desc_act", "has another order of the inputs than the layers",
        tensors=replaced(f"{Q0}.g_idx", lambda groups: groups.flip(0))),
    case("a zero point that cannot be told", "gptq", "qzeros holds 15",
        tensors=replaced(f"{Q0}.qzeros", lambda words: words * 0 - 1)),
    case("a scale that is infinite", "awq", Q0,
        tensors=replaced(f"{Q0}.scales", lambda scales: scales * float("inf"))),
    case("zero points of 8 bits", "gptq_8", "cannot be held: unpack_gptq: zero points of 8 bits",
        tensors=replaced(f"{DOWN}.qzeros", lambda words: words * 0)),
    case("AWQ without zero points", "awq", "awq without zero_point is not supported",
        settings={**q.awq_settings(), "zero_point": False}),
    case("groups of 8", "w4a16_8", "has groups of 8 inputs, supported are multiples of"),
    case("no method", "fp8", "quant_method 'None' is unknown", settings={"bits": 4}),
    case("a method of others", "fp8", "quant_method 'hqq' is unknown; there are: dense, int8",
        settings={"quant_method": "hqq"}),
    case("a block that is no pair", "fp8", "quantization_config: Expected",
        settings={**q.FP8_BLOCK, "weight_block_size": 128}),
    case("another FP8", "fp8", "fmt 'e5m2' is not supported",
        settings={**q.FP8_BLOCK, "fmt": "e5m2"}),
    case("an unknown scheme", "fp8", "activation_scheme 'odd' is unknown",
        settings={**q.FP8_BLOCK, "activation_scheme": "odd"}),
    case("three bits", "gptq", "gptq of 3 bits is not supported: 4 and 8",
        settings=q.gptq_settings(bits=3)),
    case("another GPTQ", "gptq", "checkpoint_format 'marlin' is not supported",
        settings=q.gptq_settings(checkpoint_format="marlin")),
    case("another AWQ", "awq", "awq of version 'gemv' is not supported: gemm",
        settings={**q.awq_settings(), "version": "gemv"}),
    case("no group size", "awq", "group_size is missing",
        settings={"quant_method": "awq", "bits": 4}),
    case("floats of four bits", "w4a16", "(nvfp4-pack-quantized, float of 4 bits",
        settings={"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", GROUP: {
            "a": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}}}),
    case("a group without weights", "w4a16", "b says nothing of weights",
        settings={"quant_method": "compressed-tensors", GROUP: {"b": {"targets": ["Linear"]}}}),
    case("groups of no kind", "w4a16", "quantization_config: Object missing required field",
        settings={"quant_method": "compressed-tensors"}),
]  # fmt: skip


def make(bad: Bad, original: Path, folder: Path) -> None:
    config = json.loads((original / "config.json").read_text())
    config["quantization_config"] = bad.settings
    if bad.settings is None:
        config = json.loads((original / "config.json").read_text())
    if not config["quantization_config"]:
        del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(original / "model.safetensors")
    if bad.tensors is not None:
        bad.tensors(tensors)
    file = folder / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    if bad.file is not None:
        file.write_bytes(bad.file(file.read_bytes()))


def test_the_table_is_long_enough_and_its_names_differ() -> None:
    assert len(BAD) >= 40
    assert len({bad.name for bad in BAD}) == len(BAD)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_bad_checkpoint(bad: Bad, originals: Callable[[str], Path], tmp_path: Path) -> None:
    make(bad, originals(bad.form), tmp_path)
    with pytest.raises(ConfigError) as caught:
        if bad.file is not None:  # the header tells: no torch, no process
            start = time.monotonic()
            try:
                prepare_model(ServerArgs(model_path=str(tmp_path)))
            finally:
                assert time.monotonic() - start < 5  # a second, on a machine that does nothing else
        prepare_model(ServerArgs(model_path=str(tmp_path)))
        Driver(tmp_path)
    message = str(caught.value)
    print(f"| {bad.name} | {message.replace(str(tmp_path), '')} |")
    assert bad.message in message
    assert "\n" not in message and len(message) < 500
    of_a_tensor = bad.tensors is not None and not bad.message.startswith("no tensor")
    if bad.file is not None or of_a_tensor:
        assert str(tmp_path / "model.safetensors") in message


def test_the_command_ends_with_the_code_of_a_wrong_configuration(
    originals: Callable[[str], Path], tmp_path: Path
) -> None:
    (bad,) = [each for each in BAD if each.name == "scales of other blocks"]
    make(bad, originals(bad.form), tmp_path)
    command = [sys.executable, "-m", "radix_runtime.cli", "serve", "--model-path", str(tmp_path)]
    done = subprocess.run(
        [*command, "--skip-tokenizer-init", "--port", "0", "--device", "cpu"],
        env={"PYTHONPATH": IMPORT_PATH, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 78
    assert bad.message in done.stderr and "Traceback" not in done.stderr
