"""`python -m radix_kernels.selftest`: a table, or JSON to paste into a report.

Exit status: 0 all right, 1 an error or no kernel that can run here, 2 no torch or a wrong argument.
"""

from __future__ import annotations

import argparse
import json
import sys

from radix_kernels._ops import OPS

from . import Report, Row, run


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m radix_kernels.selftest",
        description="Runs every op against its reference on a few odd shapes.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--device", help="a torch device (default: the library's)")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    parser.add_argument(
        "--op", action="append", choices=[op.name for op in OPS], metavar="NAME", help="only this"
    )
    parser.add_argument(
        "--reference", action="store_true", help="also ops without a kernel: their reference"
    )
    given = parser.parse_args(arguments)
    try:
        report = run(given.device, ops=given.op, seed=given.seed, include_reference=given.reference)
    except ModuleNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(report.as_dict()) if given.json else table(report))
    return 0 if report.ok else 1


def table(report: Report) -> str:
    """The report as text."""
    lines = [f"{name:<10} {value}" for name, value in report.facts.items() if value]
    if report.rows:
        lines += ["", _line("op", "dtype", "implementation", "cases", "worst", "bound", "")]
    lines += [_row(row) for row in report.rows]
    if report.problem:
        lines += ["", f"problem: {report.problem}"]
    ran = [row for row in report.rows if row.ok is not None]
    wrong = [row for row in ran if not row.ok]
    done = f"{len(ran)} of {len(report.rows)} ran, {len(wrong)} wrong"
    return "\n".join([*lines, "", f"{done}, {report.seconds:.1f} s"])


def _row(row: Row) -> str:
    verdict = {None: "-", True: "ok", False: "WRONG"}[row.ok]
    worst = f"{row.worst:.1e}" if row.cases else "-"
    bound = f"{row.bound:.1e}" if row.cases else "-"
    end = f"{verdict}  {row.note}".rstrip()
    return _line(row.op, row.dtype, row.implementation, str(row.cases), worst, bound, end)


def _line(*cells: str) -> str:
    op, dtype, implementation, cases, worst, bound, end = cells
    text = f"{op:<35} {dtype:<16} {implementation:<16} {cases:>5} {worst:>9} {bound:>9}  {end}"
    return text.rstrip()


if __name__ == "__main__":
    sys.exit(main())
