"""`radix bench profile`: what is read out of a trace, and the command on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radix_runtime.cli.step_profile import lines, read_step_profile, short_name
from radix_runtime.errors import ConfigError
from tests.runtime.command import SMALL, Run


def event(cat: str, name: str, start: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration}


def write(folder: Path, *steps: list[dict[str, Any]]) -> Path:
    events: list[dict[str, Any]] = [{"ph": "M", "name": "thread_name", "ts": 0}]
    for step in steps:
        events += step
    file = folder / "trace.json"
    file.write_text(json.dumps({"traceEvents": list(reversed(events))}))
    return file


def step(start: float, tokens: int = 64) -> list[dict[str, Any]]:
    """100 us: two kernels that overlap, a pause, a copy, a pause."""
    return [
        event("user_annotation", f"forward {tokens} tokens", start, 30),
        event("user_annotation", "draw", start + 30, 10),
        event("cuda_runtime", "cudaGraphLaunch", start + 5, 4),
        event("kernel", "void radix::gemm::wide_kernel<128, 64>(Params)", start + 10, 40),
        event("kernel", "void radix::(anonymous namespace)::norm<bf16>(X)", start + 20, 35),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", start + 60, 5),
    ]


def test_overlapping_kernels_count_by_how_far_they_move_the_end(tmp_path: Path) -> None:
    # A chunk of a prompt before, and steps that settle at either end.
    first = step(0, tokens=600)
    found = read_step_profile(write(tmp_path, first, *[step(100.0 * n) for n in range(1, 10)]))
    assert (found.steps, found.period) == (4, 100)
    parts = {part.name: (part.calls, part.microseconds) for part in found.device}
    assert parts == {
        "wide_kernel": (1, 40),
        "norm": (1, 5),  # 35 us long, of which 30 beside the other
        "Memcpy DtoH": (1, 5),
    }
    # 5 us before each copy; 45 after it, of which the last step's lie behind the last kernel.
    assert found.device_idle == pytest.approx((4 * 5 + 3 * 45) / 4)
    assert [(part.name, part.microseconds) for part in found.host] == [
        ("forward 64 tokens", 30),
        ("draw", 10),
    ]
    assert [(part.name, part.calls) for part in found.driver] == [("cudaGraphLaunch", 1)]
    text = "\n".join(lines(found))
    assert "4 steps of 100 us" in text and "wide_kernel" in text and "(waits)" in text
    assert "40.0%" in text


def test_a_trace_without_steps(tmp_path: Path) -> None:
    for steps in ([], [step(0), step(100)]):
        with pytest.raises(ConfigError, match="too few"):
            read_step_profile(write(tmp_path, *steps))


def test_names() -> None:
    assert short_name("nvjet_tst_128x64_64x4_1x2_h_bz") == "nvjet_tst_128x64_64x4_1x2_h_bz"
    assert short_name("void at::native::vectorized_elementwise_kernel<4, (lambda)>(int)") == (
        "vectorized_elementwise_kernel"
    )
    assert short_name("x" * 200) == "x" * 60


def test_the_command(tmp_path: Path, here: Run) -> None:
    file = tmp_path / "profile.json"
    argv = ("--rows", "1", "3", "--context", "20", "--steps", "15", "--json", str(file))
    traces = tmp_path / "traces"
    result = here("bench", "profile", *argv, "--keep-traces", str(traces), *SMALL)
    assert result.returncode == 0, result.stderr
    found = json.loads(file.read_text())["rows"]
    assert list(found) == ["1", "3"] and "3 rows of 20 tokens" in result.stdout
    for rows, profile in found.items():
        names = [part["name"] for part in profile["host"]]
        assert set(names) == {f"forward {rows} tokens", "draw"}
        assert 0 < sum(part["microseconds"] for part in profile["host"]) < profile["period"]
        assert profile["steps"] >= 8 and profile["device"] == []
    assert list(traces.glob("*.trace.json"))
    result = here("bench", "profile", "--context", "100000", *SMALL)
    assert result.returncode == 78 and "Traceback" not in result.stderr
