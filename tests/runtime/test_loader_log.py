"""What loading says while it runs: progress, and the slowest instruction set."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from radix_runtime import ops
from radix_runtime.config import ServerArgs
from radix_runtime.distributed import Communicator
from radix_runtime.layers.base import Layer
from radix_runtime.layers.moe import SparseMoe
from radix_runtime.layers.norm import build_norm
from radix_runtime.models import loader
from radix_runtime.specs import LayerNorm, Moe, SoftmaxRouter
from tests.runtime.test_layers import context as cpu_context
from tests.runtime.tiny_models import Driver, reference_model, save

torch.set_num_threads(1)


class Rank(Communicator):
    """Loads as one of several ranks; does not talk."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference_model("llama_yarn"), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"load_format": "dummy"}])
def test_progress_is_told_in_the_log(
    options: dict[str, str],
    original: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where there is no terminal: how far it is every few seconds, and the end; by one rank."""
    caplog.set_level("INFO")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    clock = itertools.count()
    monkeypatch.setattr(loader.time, "monotonic", lambda: next(clock))
    Driver(original, args=ServerArgs(model_path=str(original), **options))
    *news, end = [message for message in caplog.messages if "loading weights" in message]
    found = [[int(number) for number in re.findall(r"\d+", message)] for message in news]
    total = found[0][1]
    # A dummy's parameters: q, k and v are one, and gate and up.
    assert total == (
        33 if options.get("load_format") else len(load_file(original / "model.safetensors"))
    )
    assert [n for n, _ in found] == list(range(4, total, 5)) and {m for _, m in found} == {total}
    told = re.fullmatch(r"loading weights took (\d+\.\d) s: ([\d.e-]+) GB, ([\d.e+-]+) GB/s", end)
    assert told is not None
    assert float(told[3]) == pytest.approx(float(told[2]) / float(told[1]), rel=0.1)
    caplog.clear()
    Driver(original, args=ServerArgs(model_path=str(original), **options), communicator=Rank(1, 2))
    assert not [message for message in caplog.messages if "loading weights" in message]


def test_the_time_told_is_that_of_the_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU fills its memory while the host goes on."""
    caplog.set_level("INFO")
    clock = [100.0]
    monkeypatch.setattr(loader.time, "monotonic", lambda: clock[0])

    def wait(device: torch.device) -> None:
        assert device == torch.device("cuda", 1)
        clock[0] += 7.0

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    for device, seconds in ((torch.device("cuda", 1), "7.0"), (torch.device("cpu"), "0.0")):
        loader._tell_end(
            torch.nn.Linear(500, 700, bias=False), clock[0], quiet=False, device=device
        )
        rate = "0.0002" if device.type == "cuda" else "1.4e+03"
        assert caplog.messages[-1] == (f"loading weights took {seconds} s: 0.0014 GB, {rate} GB/s")


def test_progress_is_a_bar_on_a_terminal(
    original: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(loader, "_NEWS_SECONDS", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    Driver(original)
    assert "loading weights: 100%" in capsys.readouterr().err
    assert len([message for message in caplog.messages if "loading weights" in message]) == 1


def test_the_portable_level_is_told_by_one_rank(
    original: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU without AVX2; test_bits.py has a process that runs at that level."""
    facts = ops.capabilities()
    for isa, told in ((facts["isa"], facts["isa"] == "portable"), ("portable", True)):
        monkeypatch.setattr(ops, "capabilities", lambda isa=isa: {**facts, "isa": isa})
        caplog.clear()
        for rank in (0, 1):
            Driver(original, communicator=Rank(rank, 2))
        assert caplog.messages.count(ops.PORTABLE) == int(told)


def test_unknown_keys_are_named_once(
    original: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(original, tmp_path / "model"))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "odd_key": 1, "another": [2]}))
    Driver(folder)
    warnings = [r.message for r in caplog.records if r.levelname == "WARNING"]
    expected = "config.json: keys that LlamaForCausalLM does not know: another, odd_key"
    assert warnings == [expected]
    caplog.clear()
    Driver(folder, communicator=Rank(1, 2))
    assert not caplog.records


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        ((), "error"),
        (("topk_softmax", "fused_experts_packed"), "error"),
        (("fused_experts",), "warn"),
    ],
)
def test_the_reference_stands_in_only_for_what_this_model_needs(
    special: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU library has all of the ops but one for GPUs, which no model on a CPU needs."""
    if ops.capabilities()["backend"] != "cpu":
        pytest.skip("no native CPU library")
    chosen: list[str] = []
    monkeypatch.setattr(ops.radix_kernels, "set_fallback", chosen.append)
    ops.use_native(special, "bfloat16", quiet=True)
    assert chosen == [expected]


@pytest.mark.parametrize(("dtype", "mode"), [("float32", "warn"), ("bfloat16", "error")])
def test_only_the_dtype_of_the_model_counts(
    dtype: str, mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A library as on Hopper without Triton: attention is of 16 bits; one warning names what is
    slow, for the model that needs it."""
    native = {"impl": "cuda:sm_90", "why": ""}
    slow = {"impl": "reference", "why": ""}
    ops_here = {
        "flash_attn_with_kvcache": {"bfloat16": native, "float32": slow},
        "rmsnorm": {"bfloat16": native, "float32": native},
        "layernorm": {"bfloat16": slow, "float32": slow},  # few models need it
        "fp8_scaled_mm": {"float8_e4m3fn": native},
    }
    facts = {"backend": "cuda", "isa": "sm_90", "ops": ops_here}
    chosen: list[str] = []
    monkeypatch.setattr(ops, "capabilities", lambda: facts)
    monkeypatch.setattr(ops.radix_kernels, "set_fallback", chosen.append)
    ops.use_native(["fp8_scaled_mm"], dtype)
    assert chosen == [mode]
    expected = ["slow: no kernel for flash_attn_with_kvcache in float32 here"]
    assert caplog.messages == (expected if mode == "warn" else [])
    ops_here["fp8_scaled_mm"]["float8_e4m3fn"] = slow
    ops.use_native(["fp8_scaled_mm"], dtype)
    assert "fp8_scaled_mm" in caplog.messages[-1] and chosen[-1] == "warn"


def test_layers_name_the_ops_that_few_models_need() -> None:
    context = cpu_context()
    moe = Moe(num_experts=4, width=16, router=SoftmaxRouter(top_k=2, renormalize=True))
    block = SparseMoe(context, hidden_size=32, spec=moe)
    names = {op for m in block.modules() if isinstance(m, Layer) for op in m.special_ops}
    assert names == {"topk_softmax", "fused_experts_packed"}
    assert build_norm(context, LayerNorm(eps=1e-5), 32).special_ops == ("layernorm",)
