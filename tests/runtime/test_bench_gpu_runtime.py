"""`python -m bench.gpu_runtime`: every work with a tiny model on the CPU, and what goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.gpu_runtime import serving
from bench.gpu_runtime.__main__ import _floor, _parser
from bench.gpu_runtime.contender import Arm, EngineSizes
from bench.gpu_runtime.floors import Gpu, decode_floor_ms
from bench.gpu_runtime.models import MODELS, model_folder
from bench.gpu_runtime.process import ROOT, ArmProcess, Failed
from bench.gpu_runtime.report import short
from bench.gpu_runtime.serving import Load, ServerProcess, table_loads
from bench.gpu_runtime.stages import Stage
from bench.serving.model_shape import ModelShape
from radix_runtime.model_config import ModelConfig
from tests.runtime.tiny_config import config_folder

_CPU = "device=cpu,max_total_tokens=8192,num_threads=1"
_STEP = Stage(name="decode step 2", kind="step", limit=60, size=2, repeats=2)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return config_folder(tmp_path, context=4096)


def test_the_table_of_a_tiny_model(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    workload = tmp_path / "workload.json"
    workload.write_text(json.dumps({"requests": [[5, 3], [40, 1], [7, 6]]}))
    sizes = "--max-rows 4 --chunk 512 --context 1024 --repeats 2 --batches 1 3".split()
    sizes += ["--start-seconds", "120", "--patience", "2", "--step-prompt", "300"]
    works = ["--only", "batch-1", "TTFT 128", "step", "offline"]
    argv = [str(tiny), "--arm", f"radix:{_CPU}", *sizes, *works, "--workload", str(workload)]
    command = [sys.executable, "-m", "bench.gpu_runtime", *argv, "--json", str(file)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stderr
    rows = {row["stage"]: row["figures"] for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == [
        "start",
        "batch-1 decode",
        "TTFT 128",
        "decode step 1",
        "decode step 3",
        "offline",
    ]
    assert not any("error" in figures for figures in rows.values()), rows
    assert 0 < rows["start"]["engine_s"] < rows["start"]["first_token_s"]
    assert len(rows["TTFT 128"]["ttft_ms"]) == 2
    for name in ("period_ms", "mean_ms", "launch_ms", "thread_cpu_ms"):
        assert len(rows["decode step 3"][name]) == 2
    rate, seconds = rows["offline"]["tokens_per_second"], rows["offline"]["seconds"]
    assert [r * s for r, s in zip(rate, seconds, strict=True)] == pytest.approx([10, 10])
    assert "| tiny | radix | floor |" in found.stdout
    floor = rows["decode step 3"]["floor_ms"]
    assert floor == decode_floor_ms(ModelShape.read(tiny), 3, context=340, gpu=Gpu())
    row = f"| decode step 3 | {short(rows['decode step 3'])} | {floor:.2f} ms |"
    assert row in found.stdout


def test_a_work_that_is_too_slow_ends_its_process_and_one_that_fails_does_not(tiny: Path) -> None:
    sizes = EngineSizes(max_rows=1, chunk=512, context=1024)
    process = ArmProcess(arm=Arm.parse(f"radix:{_CPU}"), folder=tiny, sizes=sizes)
    try:
        process.facts(120)
        # One row at a time: two never decode together.
        assert "no two steps in a row decoded all of 2 rows" in process.run(_STEP)["error"]
        with pytest.raises(Failed, match="more than 0 s"):
            process.run(replace(_STEP, limit=0.01))
        with pytest.raises(Failed, match="ended with -9"):
            process.run(_STEP)
    finally:
        process.close()


def test_a_run_that_is_terminated_ends_its_engine(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    argv = [str(tiny), "--arm", f"radix:{_CPU}", "--only", "offline", "--json", str(file)]
    sizes = "--max-rows 4 --chunk 512 --context 4096 --patience 9".split()
    command = [sys.executable, "-m", "bench.gpu_runtime", *argv, *sizes]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.1)
        engines = subprocess.check_output(["pgrep", "-P", str(run.pid)], text=True).split()
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 128 + signal.SIGTERM
    finally:
        run.kill()
    assert engines
    assert not any(Path(f"/proc/{engine}").exists() for engine in engines)


def test_ranks_of_two_processes(tiny: Path) -> None:
    sizes = EngineSizes(max_rows=2, chunk=512, context=1024, ranks=2)
    process = ArmProcess(arm=Arm.parse(f"radix:{_CPU},num_threads=2"), folder=tiny, sizes=sizes)
    try:
        process.facts(120)
        assert len(process.run(_STEP)["mean_ms"]) == 2
    finally:
        process.close()


def test_a_server_of_several_ranks_is_told_so(tiny: Path) -> None:
    for engine in ("radix", "vllm"):
        command = serving._command(Arm.parse(engine), tiny, EngineSizes(ranks=4))
        assert command[command.index("--tensor-parallel-size") + 1] == "4"


def test_no_floor_is_told_of_quantized_weights_or_of_ranks() -> None:
    step = Stage(name="decode step 8", kind="step", limit=1, size=8)
    argv = ["llama3-8b", "--read-gbs", "4000"]
    whole = _parser().parse_args(argv)
    assert _floor(step, model_folder("llama3-8b"), whole)["floor_ms"] > 3
    assert _floor(step, model_folder("llama3-8b-awq"), whole) == {}
    assert _floor(step, model_folder("llama3-8b"), _parser().parse_args([*argv, "--tp", "2"])) == {}


def test_an_engine_that_does_not_start(tiny: Path) -> None:
    arm = Arm.parse(f"radix:{_CPU},dtype=float8")
    process = ArmProcess(arm=arm, folder=tiny, sizes=EngineSizes())
    try:
        with pytest.raises(Failed, match="--dtype must be one of"):
            process.facts(120)
    finally:
        process.close()


def test_arms() -> None:
    arm = Arm.parse("radix-b:page_size=32,dtype=float16,disable_radix_cache=true")
    settings = {"page_size": 32, "dtype": "float16", "disable_radix_cache": True}
    assert arm == Arm(name="radix-b", engine="radix", settings=settings)
    assert Arm.parse("vllm") == Arm(name="vllm", engine="vllm")
    listed = Arm.parse("radix:cuda_graph_bs=[1,2,8],page_size=1")
    assert listed.settings == {"cuda_graph_bs": [1, 2, 8], "page_size": 1}
    for text in ("sglang", "radix:page_size", ""):
        with pytest.raises(ValueError):
            Arm.parse(text)


@pytest.mark.parametrize("name", sorted(folder.name for folder in MODELS.iterdir()))
def test_the_models_can_be_served(name: str) -> None:
    assert ModelConfig.from_dir(model_folder(name), "{}").dtype == "bfloat16"


def test_every_token_of_a_served_model_has_a_text(tmp_path: Path) -> None:
    serving.write_tokenizer(tmp_path, vocab_size=5000)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 5000
    texts = {tokenizer.decode([1600, token]) for token in range(1600, 5000)}
    assert len(texts) == 3400
    assert tokenizer.decode([4998, 4999]) == " w4998 w4999"


def test_the_works_over_http(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_RATE_SECONDS", 2.0)  # a few requests, or some hundreds
    sizes = EngineSizes(max_rows=4, chunk=512, context=1024)
    server = ServerProcess(arm=Arm.parse(f"radix:{_CPU}"), folder=tiny, sizes=sizes)
    lengths = ("--num-prompts", "6", "--input-len", "9", "--output-len", "4")
    try:
        assert 0 < server.facts(120)["first_token_s"] < 120
        whole = server.run(Load(name="all", limit=60, argv=lengths))
        assert (whole["completed"], whole["total_output_tokens"]) == (6, 24)
        part = Load(name="part", limit=120, argv=lengths[2:], of_peak=0.5, peak="all")
        found = server.run(part)
        assert "error" not in found
        assert found["request_rate"] == pytest.approx(0.5 * whole["request_throughput"], abs=1e-3)
        assert found["failed"] == 0
        long = Load(name="long", limit=60, argv=("--num-prompts", "2", "--input-len", "2000"))
        assert "2 requests failed" in server.run(long)["error"]
        assert "more than" in server.run(replace(part, limit=0.01))["error"]
        with pytest.raises(Failed, match="the rate of 'nothing' is not known"):
            server.run(replace(part, peak="nothing"))
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(Failed, match="ended with -9"):
            server.run(Load(name="all", limit=60, argv=lengths))
    finally:
        server.close()


def test_a_server_that_does_not_start(tiny: Path) -> None:
    server = ServerProcess(arm=Arm.parse("radix:dtype=float8"), folder=tiny, sizes=EngineSizes())
    try:
        with pytest.raises(Failed, match="--dtype must be one of"):
            server.facts(120)
    finally:
        server.close()


def test_the_table_over_http_names_its_peaks(tmp_path: Path) -> None:
    loads = table_loads(tmp_path, tmp_path)
    names = [load.name for load in loads]
    for number, load in enumerate(loads):
        assert not load.of_peak or load.peak in names[:number]


@pytest.mark.parametrize(
    ("model", "rows", "milliseconds"),
    [("qwen3-0.6b", 1, 0.28), ("qwen3-0.6b", 64, 1.32), ("llama3-8b", 8, 3.50),
     ("llama3-8b", 256, 10.4)],
)  # fmt: skip
def test_floors_of_decode_steps_on_an_h200(model: str, rows: int, milliseconds: float) -> None:
    """By hand: 1.19 and 15.0 GB of weights, 115 and 131 KB of keys and values a token; 256 rows of
    the large one are bound by its 3.84 TFLOP."""
    shape = ModelShape.read(model_folder(model))
    assert decode_floor_ms(shape, rows, 640, Gpu()) == pytest.approx(milliseconds, rel=0.01)
