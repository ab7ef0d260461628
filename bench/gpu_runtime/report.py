"""The figures of a run as Markdown: a table a model, a column an arm."""

from __future__ import annotations

import statistics
from typing import Any

# The figures that a table shows, the first that an arm has; how its unit is written; digits.
_SHOWN = [
    ("first_token_s", "s", 1),
    ("ttft_ms", "ms", 1),
    ("period_ms", "ms", 2),
    ("mean_ms", "ms", 2),
    ("idle_us_p50", "µs", 1),
    ("request_goodput", "good req/s", 2),
    ("output_throughput", "tok/s", 0),
    ("tokens_per_second", "tok/s", 0),
]


def markdown(report: dict[str, Any]) -> str:
    """Every model's table, under a line with machine and versions."""
    parts = [f"{report['date']}, {report['gpu'] or report['cpu']}"]
    for model in dict.fromkeys(row["model"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["model"] == model]
        parts.append("\n".join(_table(model, rows)))
    return "\n\n".join(parts) + "\n"


def _table(model: str, rows: list[dict[str, Any]]) -> list[str]:
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    floors = {
        row["stage"]: f"{row['figures']['floor_ms']:.2f} ms"
        for row in rows
        if "floor_ms" in row["figures"]
    }
    heads = [*arms, *(["floor"] if floors else [])]
    lines = [
        f"| {model} | {' | '.join(heads)} |",
        f"|---|{'--:|' * len(heads)}",
    ]
    for stage in dict.fromkeys(row["stage"] for row in rows):
        cells = []
        for arm in arms:
            found = [row for row in rows if row["arm"] == arm and row["stage"] == stage]
            cells.append(short(found[0]["figures"]) if found else "")
        if floors:
            cells.append(floors.get(stage, ""))
        lines.append(f"| {stage} | {' | '.join(cells)} |")
    return lines


def short(figures: dict[str, Any]) -> str:
    """The one figure that matters: its median, with lowest and highest of several."""
    if "error" in figures:
        return str(figures["error"]).splitlines()[0][:60]
    for name, unit, digits in _SHOWN:
        if name in figures:
            values = figures[name] if isinstance(figures[name], list) else [figures[name]]
            text = f"{statistics.median(values):,.{digits}f} {unit}"
            if "p99_itl_ms" in figures:
                text += f", itl p99 {figures['p99_itl_ms']:.1f} ms"
            if len(values) > 1:
                text += f" ({min(values):,.{digits}f}..{max(values):,.{digits}f})"
            return text
    return ""
