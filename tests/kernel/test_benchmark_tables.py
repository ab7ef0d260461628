"""Every row of docs/benchmarks.md is in a JSON that the section names, or is marked as one of a run
without a file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
NO_FILE = "†"
ROW = re.compile(
    r"\| `(\w+)`([^|]*) \| ([^|]+?) \| ([\d,.]+)(?: \(([\d,.]+)\.\.([\d,.]+)\))? \|(.*)\|$"
)


def sections() -> dict[str, str]:
    parts = re.split(r"(?m)^#{2,3} (.+)$", (DOCS / "benchmarks.md").read_text())
    return dict(zip(parts[1::2], parts[2::2], strict=True))


WITH_ROWS = {
    name: text for name, text in sections().items() if any(map(ROW.match, text.splitlines()))
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", WITH_ROWS)
def test_rows_are_those_of_the_run(name):
    text = WITH_ROWS[name]
    files = re.findall(r"benchmarks/(\w+\.json)", text)
    assert files, "the section names no JSON"
    measured = {}
    for file in reversed(files):  # the first that is named counts, others are of earlier runs
        for row in json.loads((DOCS / "benchmarks" / file).read_text())["rows"]:
            measured[row["op"], row["shape"]] = row
    for line in text.splitlines():
        if not (match := ROW.match(line)) or NO_FILE in line:
            continue
        op, kind, shape, shown, low, high, rest = match.groups()
        kind = kind.split(",")[0].replace("bf16", "").strip()
        timings = measured[f"{op} {kind}".strip(), shape]["microseconds"]
        times = {who: timing["median_us"] for who, timing in timings.items()}
        ours = times.pop("radix")
        ends = [timings["radix"]["low_us"], timings["radix"]["high_us"]] if low else []
        for time, text in zip([ours, *ends], [shown, low, high], strict=False):
            assert abs(time - float(text.replace(",", ""))) < 0.051, line
        for theirs in times.values():
            assert f"{theirs / ours:.2f}" in rest, line


def test_most_sections_were_found():
    assert len(WITH_ROWS) >= 8
