"""`python -m bench.scheduler`: every case, small, and the comparison of two checkouts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import scheduler as bench

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("case", "size"), [("decode", 1), ("decode", 3), ("churn", 4), ("cancel", 2), ("stream", 2)]
)
def test_a_case_measures(case: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from radix_runtime import offline_loop

    monkeypatch.setattr(bench, "BLOCKS", 1)
    monkeypatch.setattr(offline_loop, "create_executor", offline_loop.create_executor)
    figures = bench.CASES[case](size)
    if case != "cancel":  # a difference, which may be anything
        assert all(value >= 0 for value in figures.values())
    if case == "decode":
        phases = sum(figures[name] for name in bench.PHASES)
        assert phases > 0 and figures["plan bytes"] > 40


def test_two_checkouts_are_laid_side_by_side(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [sys.executable, "-m", "bench.scheduler", "--only", "decode", "--rows", "2", "5"]
    command += ["--rounds", "1", "--against", str(ROOT), "--json", str(file)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = answer.stdout.strip().splitlines()
    assert lines[0].startswith("| decode | step |") and len(lines) == 4
    assert lines[2].startswith("| 2 | ") and "(" in lines[3]
    ours, other = json.loads(file.read_text())["decode 5"]
    assert ours.keys() == other.keys() and ours["step"] > 0
