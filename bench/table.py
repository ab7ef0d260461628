"""The rows of a JSON of `python -m bench.kernels` as Markdown, for docs/benchmarks.md.

    python -m bench.table docs/benchmarks/h200_moe.json [--shapes TEXT...]

tests/kernel/test_benchmark_tables.py checks that the document shows what the files say.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

_HEADS = {
    "op": "---",
    "shape": "---",
    "µs": "--:",
    "GB/s": "--:",
    "TFLOP/s": "--:",
    "share of the limit": "--:",
    "clock": "--:",
    "peers: their time over ours": "---",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.table", description=__doc__)
    parser.add_argument("file", type=Path, nargs="+")
    parser.add_argument(
        "--shapes", nargs="+", default=[""], help="only shapes that contain one of these texts"
    )
    args = parser.parse_args()
    for file in args.file:
        report = json.loads(file.read_text())
        rows = [row for row in report["rows"] if any(text in row["shape"] for text in args.shapes)]
        print("\n".join(table([cells(row) for row in rows])))


def cells(row: dict[str, Any]) -> dict[str, str]:
    """What the table shows of a row; what the file does not say is left out."""
    op, _, kind = row["op"].partition(" ")
    times = {name: timing["median_us"] for name, timing in row["microseconds"].items()}
    ours = times.pop("radix")
    shown = {
        "op": f"`{op}` {kind}".strip(),
        "shape": row["shape"],
        "µs": f"{ours:,.1f}{_spread(row)}",
    }
    if "bytes" in row:
        cpu = row["microseconds"]["radix"].get("method") == "loop"
        shown["GB/s"] = f"{row['bytes'] / ours / 1e3:,.{1 if cpu else 0}f}"
        shown["TFLOP/s"] = f"{row['flops'] / ours / 1e6:,.{2 if cpu else 1}f}"
    if "share_of_limit" in row:
        shown["share of the limit"] = (
            "in cache" if row.get("in_cache") else f"{row['share_of_limit']:.0%}"
        )
    if clock := row["microseconds"]["radix"].get("sm_mhz"):
        shown["clock"] = f"{clock:,.0f} MHz"
    shown["peers: their time over ours"] = ", ".join(
        f"{name} {time / ours:.2f}" for name, time in times.items()
    )
    return shown


def _spread(row: dict[str, Any]) -> str:
    """The lowest and highest of our times where they say that something disturbed the run."""
    low, high = (row["microseconds"]["radix"][end] for end in ("low_us", "high_us"))
    return f" ({low:,.1f}..{high:,.1f})" if high > 1.1 * low else ""


def table(rows: list[dict[str, str]]) -> list[str]:
    """The lines of a Markdown table; columns that no row has are left out."""
    heads = [head for head in _HEADS if any(head in row for row in rows)]
    lines = [
        heads,
        [_HEADS[head] for head in heads],
        *([row.get(head, "") for head in heads] for row in rows),
    ]
    return ["| " + " | ".join(line) + " |" for line in lines]


if __name__ == "__main__":
    main()
