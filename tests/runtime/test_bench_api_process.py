"""`python -m bench.api_process`: a small run, real processes and all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_several_api_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.api_process", "--api-processes", "2"]
    command += ["--streams", "8", "--ticks", "10", "--tick-ms", "5", "--rounds", "1"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    heads, _, cells = (line.split(" | ") for line in answer.stdout.strip().splitlines())
    figures = dict(zip(heads[1:], cells[1:], strict=True))
    assert 0.5 <= float(figures["busiest"]) < 1


def test_two_routes_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [sys.executable, "-m", "bench.api_process", "--routes", "completions", "messages"]
    command += ["--streams", "3", "--ticks", "10", "--tick-ms", "5", "--rounds", "1"]
    answer = subprocess.run(
        [*command, "--json", str(file)], cwd=ROOT, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.strip().splitlines()
    assert lines[0].startswith("| route | process | loop |") and len(lines) == 4
    found = json.loads(file.read_text())
    for route in ("completions", "messages"):
        (figures,) = found[route]
        assert figures["process"] >= figures["loop"] > 0
        assert figures["write only"] > 0 and figures["events"] > 0
