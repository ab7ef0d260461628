"""The programs for a machine with a GPU (tests/gpu, bench/gpu_runtime), on the CPU with a tiny
model: they run to their end, and find what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu_runtime import occupancy
from bench.gpu_runtime.process import ROOT
from radix_runtime import Engine, ops
from radix_runtime.layers.moe import Experts
from radix_runtime.model_config import ModelConfig
from radix_runtime.quantization.base import ExpertTerms
from radix_runtime.step_times import StepTimes
from tests.gpu import family_tokens, gpt_oss_tokens, toggle_tokens
from tests.gpu.random_load import Minute, RandomCalls, Run, minutes
from tests.runtime.tiny_config import config_folder

pytestmark = pytest.mark.serial


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return config_folder(tmp_path, context=512)


def test_occupancy(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "cells.json"
    settings = {"device": "cpu", "max_total_tokens": 1024, "num_threads": 1}
    sizes = "--contexts 256 9999 --rows 4 --chunks 128 --seconds 1 --share 0".split()
    argv = [str(tiny), *sizes, "--settings", json.dumps(settings), "--json", str(file)]
    command = [sys.executable, "-m", "bench.gpu_runtime.occupancy", *argv]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout + found.stderr
    cells = json.loads(file.read_text())["cells"]
    assert [cell["cell"]["context"] for cell in cells] == [256, 512]
    for cell in cells:
        assert cell["figures"]["rows_max"] > 0 and cell["figures"]["kv_tokens"] == 1024
    assert "2 of 2 cells are good" in found.stdout


def test_a_cell_that_fails(tiny: Path) -> None:
    settings = {"device": "cpu", "max_total_tokens": 1 << 50}
    cell = occupancy.Cell(folder=str(tiny), context=256, rows=4, chunk=128, settings=settings)
    figures = occupancy.measure_apart(cell, seconds=1)
    assert "--max-total-tokens" in figures["error"]
    assert not occupancy.is_good(figures, share=0)
    assert "--max-total-tokens" in occupancy.table([{"cell": vars(cell), "figures": figures}])


def test_random_load(tiny: Path) -> None:
    with Engine(
        tiny,
        device="cpu",
        load_format="dummy",
        max_running_requests=8,
        chunked_prefill_size=128,
        max_total_tokens=512,
        check_invariants="step",
    ) as engine:
        calls = RandomCalls(engine, seed=3)
        calls.drive(120)
        assert calls.left_over() == []
        assert calls.made == 120 and calls.aborted
        engine._scheduler.life.allocator.alloc(1)  # leaks
        with pytest.raises(Exception, match="page"):
            calls.left_over()


def run_engines(model: Path, max_total_tokens: int) -> subprocess.CompletedProcess[str]:
    """Two engines side by side, on the CPU."""
    sizes = "--device cpu --requests 0 --runs 1 --engines 2 --seconds 1 --rows 4 --context 256"
    argv = [str(model), *sizes.split(), "--max-total-tokens", str(max_total_tokens)]
    command = [sys.executable, "-m", "tests.gpu.random_load", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_load_of_several_engines(tiny: Path) -> None:
    found = run_engines(tiny, 1024)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("run 0: ") == 2
    assert found.stdout.endswith("nothing is left over\n")


def test_engines_that_die(tiny: Path) -> None:
    found = run_engines(tiny, 1 << 50)
    assert found.returncode == 1
    assert "WRONG: 2 engines died" in found.stdout
    assert "--max-total-tokens" in found.stderr


def step(launched: float, device: float) -> StepTimes:
    """One that begins on the device when it is launched."""
    return StepTimes(
        step_id=0,
        num_decode=1,
        num_chunks=0,
        num_tokens=1,
        planned=launched,
        launched=launched,
        queued=launched,
        awaited=launched,
        completed=launched + device,
        accepted=launched + device,
        device_start=launched,
        device_end=launched + device,
    )


def test_p99_of_a_minute() -> None:
    steps = [step(0, 5), step(1, 0.25), step(2, 0.5), step(4, 0.75), step(100, 9)]
    # Of three periods the second largest, of four steps the third largest.
    assert Minute.of(steps, (0, 5)) == Minute(period=1000.0, device=750.0)
    assert Minute.of(steps, (3, 200)) == Minute(period=96000.0, device=750.0)
    assert Minute.of(steps, (200, 300)) == Minute(period=0.0, device=0.0)


def test_minutes_are_whole_laps() -> None:
    laps = [0.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0, 17.0]
    assert minutes(laps, 3) == [(5, 9), (9, 13), (13, 17)]
    assert minutes(laps, 5) == [(5, 11), (11, 17)]
    assert minutes(laps, 12) == [(5, 17)]
    assert minutes(laps, 13) == []
    assert minutes(laps[:1], 0.1) == []


@pytest.mark.parametrize(
    ("periods", "fault"),
    [
        ([20.0, 99.0, 20.9], None),
        ([20.0, 20.0, 21.1], "run 3: p99 20.00, then 21.10 ms"),
        ([20.0, 9.0], None),
        ([20.0], "run 3 is too short to compare its first minute with its last"),
    ],
)
def test_faults_of_a_run(periods: list[float], fault: str | None) -> None:
    found = [Minute(period=period, device=1) for period in periods]
    run = Run(number=3, steps=1000, minutes=found, gpu_bytes=0)
    assert run.wrong() == fault


class SilentEngine:
    """Takes calls, which end at once."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(vocab_size=1000)
        self.calls: list[dict[str, Any]] = []

    def stream(self, **call: Any) -> Iterator[Any]:
        self.calls.append(call)
        return iter([])


def test_laps_repeat_their_work() -> None:
    engine: Any = SilentEngine()
    load = occupancy.FullLoad(engine, context=100, rows=8, lap=6)
    turns = load.run(60)
    while len(engine.calls) < 18:
        next(turns)
    assert len(load.laps) == 3
    first = engine.calls[:6]
    second = engine.calls[6:12]
    for a, b in zip(first, second, strict=True):
        assert a["sampling_params"] == b["sampling_params"]
        assert a["return_logprob"] == b["return_logprob"]
        assert [p[8:] for p in a["input_ids"]] == [p[8:] for p in b["input_ids"]]
        assert [p[:8] for p in a["input_ids"]] != [p[:8] for p in b["input_ids"]]
    assert first[0]["sampling_params"] != first[1]["sampling_params"]


def test_toggle_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    toggle_tokens.write(file, ["qwen3", "mistral"], 6)
    toggles = ["page of one", "cache"]
    assert toggle_tokens.compare(file, ["qwen3", "mistral"], toggles, "cpu") == 0
    recorded = json.loads(file.read_text())
    recorded["qwen3"][2]["tokens"][0] += 1
    recorded["qwen3"][2]["gaps"][0] = 1.0
    file.write_text(json.dumps(recorded))
    assert toggle_tokens.compare(file, ["qwen3"], ["cache"], "cpu") == 1


@pytest.mark.parametrize("experts", gpt_oss_tokens.EXPERTS)
def test_gpt_oss_tokens(
    experts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {**gpt_oss_tokens.SIZES, "hidden_size": 128, "num_hidden_layers": 2}
    assert gpt_oss_tokens.check("cpu", sizes, 64, experts)
    assert capsys.readouterr().out.count("ok ") == 2
    without = ExpertTerms(bias1=None, bias2=None, activation=ops.ClampedSwiGlu())
    monkeypatch.setattr(Experts, "terms", lambda self: without)
    assert not gpt_oss_tokens.check("cpu", sizes, 64, experts)
    assert f"WRONG {experts}, float32" in capsys.readouterr().out


def test_family_tokens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A model without its windows is noticed."""
    for key, size in {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}.items():
        monkeypatch.setitem(family_tokens.SIZES, key, size)
    monkeypatch.setitem(family_tokens.FAMILIES["gemma3"], "head_dim", 64)
    monkeypatch.setattr(family_tokens, "ROUNDS", 10)
    assert family_tokens.check("gemma3", "cpu", num_prompts=3, count=8)
    told = capsys.readouterr().out
    assert "ok    gemma3, bfloat16: 3 of 3 prompts compared to the end, 24 of 24 tokens" in told
    from_dir = ModelConfig.from_dir

    def without_windows(path: Path) -> ModelConfig:
        config = from_dir(path)
        layers = tuple(
            replace(layer, mixer=replace(layer.mixer, window=None)) for layer in config.spec.layers
        )
        return replace(config, spec=replace(config.spec, layers=layers))

    monkeypatch.setattr(ModelConfig, "from_dir", lambda path, *options: without_windows(path))
    assert not family_tokens.check("gemma3", "cpu", num_prompts=3, count=8)
    assert "WRONG gemma3, bfloat16" in capsys.readouterr().out


def test_family_tokens_compares_up_to_a_near_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Position 1 of the first prompt is nearly a tie, and position 3 of the second differs."""
    exact = torch.tensor([0.0, 1.0, 3.0]).repeat(2, 4, 1)
    exact[0, 1, 1] = 2.8
    rounded = exact.clone()
    rounded[0, 1:, 1] = 4.0
    models = family_tokens.Made(folder=Path(), exact=exact, rounded=rounded)
    decided = torch.zeros(2, 4, dtype=torch.bool)
    monkeypatch.setattr(family_tokens, "next_logits", lambda model, rows, count: model)
    monkeypatch.setattr(
        family_tokens,
        "routing_decides",
        lambda model, rows, count: decided[[row[0] - 5 for row in rows]],
    )
    text, good = family_tokens.compare(models, [[5], [6]], [[2] * 4] * 2, 4)
    assert not good  # one of two to the end
    assert text.startswith("1 of 2 prompts compared to the end, 5 of 8 tokens equal")
    assert "1 prompts part, 0 where routing decides, 0 at a clear gap, " in text
    assert text.endswith("first: token 1 of prompt 0, gap 0.200")
    monkeypatch.setattr(family_tokens, "SHARE", 0.5)
    assert family_tokens.compare(models, [[5], [6]], [[2] * 4] * 2, 4)[1]
    text, good = family_tokens.compare(models, [[5], [6]], [[2] * 4, [2, 2, 2, 1]], 4)
    assert not good and "0 where routing decides, 1 at a clear gap" in text
    decided[1, 3] = True  # excused, but too often
    text, good = family_tokens.compare(models, [[5], [6]], [[2] * 4, [2, 2, 2, 1]], 4)
    assert not good and "1 where routing decides, 0 at a clear gap" in text
    monkeypatch.setattr(family_tokens, "EXCUSED", 0.5)
    assert family_tokens.compare(models, [[5], [6]], [[2] * 4, [2, 2, 2, 1]], 4)[1]


class Routed(torch.nn.Module):
    """Token i is followed by 0, or by 1 where the first of i's two scores is the lower one."""

    def __init__(self, scores: list[list[float]]) -> None:
        super().__init__()
        self.scores = torch.tensor(scores)
        self.mlp = torch.nn.ModuleDict({"gate": torch.nn.Identity()})
        self.lm_head = torch.nn.Linear(2, 2, bias=False)
        self.lm_head.weight.data.copy_(torch.eye(2))

    def model(self, input_ids: torch.Tensor, use_cache: bool) -> tuple[torch.Tensor]:
        chosen = self.mlp["gate"](self.scores[input_ids]).argmax(-1)
        return (torch.nn.functional.one_hot(chosen, 2).float(),)


def test_where_routing_decides() -> None:
    """Token 0 is sure of its expert, token 1 is not, within what bfloat16 rounds."""
    model = Routed([[1.0, 0.5], [1.0, 1.001]])
    decided = family_tokens.routing_decides(model, [[0, 0, 1, 0], [1, 1, 0, 0]], 3)
    assert decided.tolist() == [[False, False, True], [True, True, False]]
    assert not model.mlp["gate"]._forward_pre_hooks
