"""`python -m bench.api_process`: a small run, real processes and all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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
