"""The figures of the README, from the JSON files under docs/benchmarks.

    python -m bench.readme_figures          # rewrites the table in README.md and the chart
    python -m bench.readme_figures --check  # exit status 1 if either is not what the files say

A row names one measurement. Its ratio is the peer's time over ours in the same run: above 1 we are
faster. The chart, docs/images/h200.svg, shows the fastest peer of each row.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
CHART = ROOT / "docs" / "images" / "h200.svg"
BEGIN = "<!-- figures: python -m bench.readme_figures -->"
END = "<!-- end of figures -->"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement, and what the README calls it."""

    label: str
    detail: str
    file: str
    op: str
    shape: str
    peers: dict[str, str]  # name in the file -> name in the README; others are left out


ATTENTION_PEERS = {
    "torch cuDNN": "cuDNN",
    "FA3 (vllm)": "FlashAttention-3",
    "flashinfer fa3": "FlashInfer",
    "flashinfer": "FlashInfer",
}
MLA_PEERS = {"FlashMLA": "FlashMLA", "flashinfer fa3": "FlashInfer"}
FP8_PEERS = {
    "cuBLASLt tensor": "cuBLASLt",
    "vLLM CUTLASS": "CUTLASS (vLLM)",
    "DeepGEMM": "DeepGEMM",
}
EXPERT_PEERS = {
    "vllm": "vLLM",
    "vllm DeepGEMM": "DeepGEMM (vLLM)",
    "torch grouped_mm": "torch",
}
POINTWISE_PEERS = {"flashinfer": "FlashInfer", "vllm": "vLLM", "torch": "torch"}
COMM_PEERS = {
    "NCCL": "NCCL",
    "vLLM custom": "vLLM",
    "symmetric memory one shot": "torch symmetric memory",
}

ROWS = (
    Row(
        label="Prefill attention",
        detail="causal, 32/8 heads of 128, 8,192 tokens",
        file="h200_prefill",
        op="flash_attn_varlen",
        shape="B1 S8192 32/8x128",
        peers=ATTENTION_PEERS,
    ),
    Row(
        label="Decode attention",
        detail="32/8 heads of 128, 64 requests of 4,096 tokens, pages of 16",
        file="h200_decode",
        op="flash_attn_with_kvcache",
        shape="B64 kv4096 page 16 32/8x128",
        peers=ATTENTION_PEERS,
    ),
    Row(
        label="MLA decode, 16 heads",
        detail="64 requests of 4,096 tokens",
        file="h200_mla",
        op="mla_decode",
        shape="B64 kv4096 page 64 16 heads",
        peers=MLA_PEERS,
    ),
    Row(
        label="MLA decode, 128 heads",
        detail="128 requests of 4,096 tokens",
        file="h200_mla",
        op="mla_decode",
        shape="B128 kv4096 page 64 128 heads",
        peers=MLA_PEERS,
    ),
    Row(
        label="Linear, bf16",
        detail="16 x 6144 x 4096",
        file="h200_gemm",
        op="linear",
        shape="16x6144x4096",
        peers={"torch": "cuBLAS"},
    ),
    Row(
        label="Linear, FP8",
        detail="16 x 6144 x 4096, fast accumulation",
        file="h200_gemm",
        op="fp8_scaled_mm fast_accum",
        shape="16x6144x4096",
        peers=FP8_PEERS,
    ),
    Row(
        label="Linear, FP8 block scales",
        detail="4096 x 28672 x 4096",
        file="h200_gemm",
        op="fp8_blockwise_scaled_mm",
        shape="4096x28672x4096",
        peers={"DeepGEMM": "DeepGEMM"},
    ),
    Row(
        label="Experts, bf16",
        detail="128 of width 768, top 8, 64 tokens",
        file="h200_moe",
        op="fused_experts",
        shape="64xE128 k8 H2048 I768",
        peers=EXPERT_PEERS,
    ),
    Row(
        label="Experts, FP8",
        detail="the same, 4,096 tokens",
        file="h200_moe",
        op="fused_experts",
        shape="4096xE128 k8 H2048 I768 fp8",
        peers=EXPERT_PEERS,
    ),
    Row(
        label="Add + RMSNorm",
        detail="4096 x 4096",
        file="h200_pointwise",
        op="fused_add_rmsnorm",
        shape="4096x4096",
        peers=POINTWISE_PEERS,
    ),
    Row(
        label="Sampling",
        detail="top-k 50 and top-p 0.9, 256 x 151,936",
        file="h200_sampling",
        op="top_k_top_p_sampling",
        shape="256x151936 top-k 50 top-p 0.9",
        peers={"flashinfer": "FlashInfer", "torch": "torch"},
    ),
    Row(
        label="All-reduce, 2 GPUs",
        detail="256 KiB",
        file="h200_all_reduce",
        op="all_reduce",
        shape="TP2 256 KiB",
        peers=COMM_PEERS,
    ),
    Row(
        label="All-reduce, 4 GPUs",
        detail="256 KiB",
        file="h200_all_reduce",
        op="all_reduce",
        shape="TP4 256 KiB",
        peers=COMM_PEERS,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What a row measured."""

    row: Row
    microseconds: float
    share_of_limit: float | None  # None: the op is bound by latency
    ratios: dict[str, float]  # peer -> its time over ours

    @property
    def fastest_peer(self) -> str:
        return min(self.ratios, key=lambda peer: self.ratios[peer])


@cache
def _report(file: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((ROOT / "docs" / "benchmarks" / f"{file}.json").read_text())
    return report


def figure(row: Row) -> Figure:
    """Raises LookupError if the file has no such row or none of the peers."""
    for measured in _report(row.file)["rows"]:
        if (measured["op"], measured["shape"]) == (row.op, row.shape):
            break
    else:
        raise LookupError(f"{row.file}.json has no {row.op} of {row.shape}")
    times = {name: timing["median_us"] for name, timing in measured["microseconds"].items()}
    ours = times["radix"]
    ratios = {row.peers[name]: time / ours for name, time in times.items() if name in row.peers}
    if not ratios:
        raise LookupError(f"{row.file}.json: {row.op} of {row.shape} has no peer of the list")
    return Figure(
        row=row,
        microseconds=ours,
        share_of_limit=measured.get("share_of_limit"),
        ratios=ratios,
    )


def table(figures: list[Figure]) -> str:
    """The Markdown table, with the dates of the runs under it."""
    lines = [
        "| kernel | shape | µs | of the limit | peer's time over ours |",
        "|---|---|--:|--:|---|",
    ]
    for one in figures:
        share = f"{one.share_of_limit:.0%}" if one.share_of_limit else "-"
        peers = sorted(one.ratios.items(), key=lambda item: item[1])
        ratios = ", ".join(f"{peer} {ratio:.2f}" for peer, ratio in peers)
        lines.append(
            f"| {one.row.label} | {one.row.detail} | {one.microseconds:,.1f} | {share} | {ratios} |"
        )
    dates = sorted({_report(one.row.file)["date"] for one in figures})
    lines += ["", f"NVIDIA H200, {' and '.join(dates)}; each row is one run with its peers."]
    return "\n".join(lines)


# The chart ---------------------------------------------------------------------------

_WIDTH = 760
_LABELS = 190  # pixels left of the bars
_UNIT = 200  # pixels of a ratio of 1
_MOST = 2.2  # longer bars are cut there
_PITCH = 24
_TOP = 34


def chart(figures: list[Figure]) -> str:
    """A bar a row: the fastest peer's time over ours; legible on white and on black."""
    bottom = _TOP + _PITCH * len(figures)
    one = _LABELS + _UNIT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{bottom + 12}"'
        ' font-family="system-ui, sans-serif" font-size="12" fill="#808080">',
        f'<text x="{one}" y="14" text-anchor="middle">fastest peer = 1</text>',
        f'<text x="{_WIDTH - 6}" y="14" text-anchor="end">speed over the fastest peer, H200</text>',
    ]
    for index, each in enumerate(figures):
        parts += _bar(each, y=_TOP + _PITCH * index)
    parts.append(
        f'<line x1="{one}" x2="{one}" y1="{_TOP - 12}" y2="{bottom}" stroke="#808080"'
        ' stroke-dasharray="3 3"/>'
    )
    return "\n".join([*parts, "</svg>", ""])


def _bar(one: Figure, y: int) -> list[str]:
    peer = one.fastest_peer
    ratio = one.ratios[peer]
    width = round(_UNIT * min(ratio, _MOST))
    middle = y + 4
    right = _LABELS + max(width, _UNIT) + 8
    return [
        f'<text x="{_LABELS - 10}" y="{middle}" text-anchor="end">{escape(one.row.label)}</text>',
        f'<rect x="{_LABELS}" y="{y - 8}" width="{width}" height="16" rx="2" fill="#3b82c4"/>',
        f'<text x="{right}" y="{middle}">{ratio:.2f}, {escape(peer)}</text>',
    ]


def readme_with(text: str, figures: list[Figure]) -> str:
    """`text` with the part between the markers replaced. Raises ValueError without them."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("README.md has no markers for the figures")
    return f"{before}{BEGIN}\n\n{table(figures)}\n\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.readme_figures", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, compare")
    check: bool = parser.parse_args().check
    figures = [figure(row) for row in ROWS]
    wanted = {README: readme_with(README.read_text(), figures), CHART: chart(figures)}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is stale' if check else 'rewritten'}")
        if not check:
            path.write_text(wanted[path])
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
