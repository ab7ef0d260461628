"""What ran on the executor, by op and chip: counted in the tests, written as the table of
docs/kernels/rocm.md.

    python -m tests.gcn.executed build/rocm-sim/executed/*.json   # what --executed FILE wrote
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gcn import library

DOCUMENT = Path(__file__).parents[2] / "docs/kernels/rocm.md"
BEGIN = "<!-- executed: written by tests/gcn/executed.py -->\n"
END = "<!-- end of executed -->\n"

_calls: dict[str, int] = collections.defaultdict(int)
_seconds: dict[str, float] = collections.defaultdict(float)


@contextlib.contextmanager
def counted(name: str) -> Iterator[None]:
    """A call of an op, or a launch of one of Triton's kernels, that did not raise is one more case
    of `name`, with the CPU time that it took."""
    begin = time.process_time()
    yield
    _calls[name] += 1
    _seconds[name] += time.process_time() - begin


def write(path: Path, group: str) -> None:
    """The counts of this process as JSON. group: the heading of its rows, as `ops`."""
    facts = library.report()
    found = {
        "target": os.environ.get("GCN_TARGET", "gfx942"),
        "group": group,
        "names": {name: [_calls[name], _seconds[name]] for name in sorted(_calls)},
        "launches": facts["launches"],
        "kernels": len(facts["kernels"]),
        "instructions": facts["instructions"],
        "unknown": len(facts["unknown"]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1))


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a table for each group, a row a name, two columns a chip: cases and CPU seconds."""
    parts = []
    for group in sorted({run["group"] for run in runs}):
        own = sorted((r for r in runs if r["group"] == group), key=lambda r: r["target"])
        parts.append(_table_of(group, own))
    return "\n".join(parts)


def _table_of(group: str, runs: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f" {run['target']}: cases | CPU s |" for run in runs)
    lines = [f"| {group} |{head}", "|---|" + "---:|---:|" * len(runs)]
    for name in sorted({name for run in runs for name in run["names"]}):
        cells = "".join(_cells(*run["names"].get(name, (0, 0.0))) for run in runs)
        lines.append(f"| `{name}` |{cells}")
    totals = [[sum(column) for column in zip(*run["names"].values(), strict=True)] for run in runs]
    lines.append("| all |" + "".join(_cells(*total) for total in totals))
    said = [
        f"{run['target']}: {run['launches']:,} launches of {run['kernels']} kernels,"
        f" {run['instructions'] / 1e6:,.0f} million wave instructions,"
        f" {run['unknown']} unknown."
        for run in runs
    ]
    return "\n".join([*lines, "", "  \n".join(said), ""])


def _cells(calls: int, seconds: float) -> str:
    return f" {calls:,} | {seconds:.1f} |" if calls else " | |"


def put_into(document: str, text: str) -> str:
    """The document with `text` between its two marks."""
    before, _, rest = document.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError("the document has no place for the table")
    return before + BEGIN + "\n" + text + "\n" + END + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="what --executed wrote")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    args = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in args.runs]
    args.document.write_text(put_into(args.document.read_text(), table(runs)))


if __name__ == "__main__":
    main()
