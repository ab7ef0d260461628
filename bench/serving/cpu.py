"""`python -m bench.serving cpu [--peers]`: tokens a second of a model with random weights, or of
those in a GGUF file, beside other programs. RADIX_CPU_ISA lowers the instruction set of ours and of
llama.cpp (`python -m bench.peers_cpu.build --level`).

Contenders take turns of --seconds on the same cores; a ratio is the median of the ratios of --pairs
such turns. Before every turn the read bandwidth of these cores is measured: `of probe` is the share
of it that a decode step's weights, keys and values take, as the median over the turns.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.peers_cpu import gguf_file
from bench.peers_cpu.build import FOLDER
from bench.real_model import smollm2
from radix_runtime.cli.output_file import output_file

from .contender import FILE_WEIGHTS, ROOT, Process, Work
from .model_shape import ModelShape
from .probe import ReadProbe

MODEL = ROOT / "bench/serving/models/qwen3-0.6b"
PEERS = {
    "bf16": ["llama.cpp", "transformers", "vllm"],
    "int8": ["llama.cpp"],
    "int4": ["llama.cpp"],
    gguf_file.MIXED: ["llama.cpp"],
    FILE_WEIGHTS: ["llama.cpp"],
}
RANDOM = ["bf16", "int8", "int4"]
SERVER = "radix serve"
_KV_BYTES = 2  # of a bfloat16 number
WORKS = {
    "decode1": Work("decode"),
    "decode32": Work("decode", batch=32, steps=8),
    "decode32long": Work("decode", batch=32, context=1024, steps=8),
    "prefill": Work("prefill", context=1024),
    "prefill512": Work("prefill", context=512),
}


@dataclass
class Row:
    """One contender at one work: tokens a second in each turn, and the probe's GB/s just before."""

    contender: str
    version: str
    weights: str
    work: Work
    step_bytes: float  # least bytes of a decode step
    rates: list[float] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second, the median of the turns."""
        return statistics.median(self.rates)

    @property
    def of_probe(self) -> float:
        """Share of the read bandwidth that the least bytes of a decode step take."""
        steps = (rate / self.work.batch for rate in self.rates)
        pairs = zip(steps, self.probes, strict=True)
        return statistics.median(s * self.step_bytes / (gbs * 1e9) for s, gbs in pairs)


def main(argv: list[str]) -> None:
    args = _parse(argv)
    if args.layers is not None:
        args.model = cut_layers(args.model, args.layers)
    if args.model.is_file():
        args.weights = [FILE_WEIGHTS]
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    probe = ReadProbe(cores)
    shape = ModelShape.read(args.model)
    print(
        f"{datetime.date.today()}  {cpu_name()}, cores {cores}  {args.model.name}"
        f"  probe {probe.gbs(1.0):.1f} GB/s"
    )
    rows: list[Row] = []
    for weights in args.weights:
        names = ["radix", *_peers(args.peers, weights)]
        processes = _started(names, args.model, weights, cores)
        for name in args.works:
            found = _measure(processes, weights, WORKS[name], probe, shape, args)
            rows += found
            for row in found:
                print(_line(row, found), flush=True)
            if args.json:
                args.json.write_text(json.dumps(_report(rows, args), indent=1) + "\n")
        for process in processes:
            process.close()


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.serving cpu", description=__doc__)
    parser.add_argument(
        "--model",
        type=_model,
        default=MODEL,
        metavar="MODEL",
        help="folder with a config.json; a GGUF file, whose weights are taken; or smollm2, that of "
        "`make real-model`",
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="cores, a thread each (default: %(default)s)"
    )
    parser.add_argument(
        "--layers", type=int, metavar="N", help="the first N layers of the model in a folder"
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        default=RANDOM,
        choices=[*RANDOM, gguf_file.MIXED],
        help=f"{gguf_file.MIXED}: a GGUF file of that name's types is written, for all contenders "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--works", nargs="+", default=["decode1", "decode32", "prefill"], choices=list(WORKS)
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        metavar="NAME",
        help=f"beside these, or all: {PEERS['bf16']}; also {SERVER!r}",
    )
    parser.add_argument("--pairs", type=int, default=5, help="turns (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="least time of a turn (default: %(default)s)"
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write all figures there, after each work"
    )
    return parser.parse_args(argv)


def _model(text: str) -> Path:
    """The folder or file that --model names. Of argparse; raises its error."""
    path = smollm2() if text == "smollm2" else Path(text)
    if path is None:
        raise argparse.ArgumentTypeError("smollm2 is not there: make real-model")
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{path} does not exist")
    return path


def cut_layers(folder: Path, layers: int) -> Path:
    """A folder whose config.json says so many layers. Raises SystemExit."""
    if folder.is_file():
        raise SystemExit(f"--layers needs a folder with a config.json; {folder} is a file")
    config = json.loads((folder / "config.json").read_text())
    made = FOLDER / f"{folder.name}-{layers}-layers"
    made.mkdir(parents=True, exist_ok=True)
    config["num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    text = json.dumps(config)
    if not (made / "config.json").exists() or (made / "config.json").read_text() != text:
        (made / "config.json").write_text(text)
    return made


def _peers(wanted: list[str] | None, weights: str) -> list[str]:
    """None: without; empty: all but the server."""
    if wanted is None:
        return []
    return [name for name in [*PEERS[weights], SERVER] if name in (wanted or PEERS[weights])]


def _started(names: list[str], model: Path, weights: str, cores: list[int]) -> list[Process]:
    processes = []
    if weights == gguf_file.MIXED:
        file = FOLDER / f"{model.name}-{weights}.gguf"
        gguf_file.written(file, model, weights)
        model = file
        weights = FILE_WEIGHTS
    for name in names:
        try:
            processes.append(Process(name=name, folder=model, weights=weights, cores=cores))
            print(_facts(processes[-1], weights), flush=True)
        except RuntimeError as error:
            print(f"  no contender {error}", flush=True)
    return processes


def _measure(
    processes: list[Process],
    weights: str,
    work: Work,
    probe: ReadProbe,
    shape: ModelShape,
    args: argparse.Namespace,
) -> list[Row]:
    tokens = work.batch * (work.context + work.steps / 2)  # in the cache, on average
    cache = tokens * shape.kv_numbers * _KV_BYTES
    rows = []
    for process in processes:
        known = process if process.weight_bytes else processes[0]
        experts = shape.named_share(work.batch) * known.expert_bytes
        rows.append(
            Row(
                contender=process.name,
                version=process.version,
                weights=weights,
                work=work,
                step_bytes=known.weight_bytes + experts + cache,
            )
        )
    for process in processes:
        process.rate(work, 0.0)  # first use
    for _ in range(args.pairs):
        for row, process in zip(rows, processes, strict=True):
            row.probes.append(probe.gbs())
            row.rates.append(process.rate(work, args.seconds))
    return rows


def _facts(process: Process, weights: str) -> str:
    if not process.weight_bytes:
        return f"  {process.name} {process.version}"
    read = f"{process.weight_bytes / 1e9:.3f} GB of {weights} weights a step"
    if process.expert_bytes:
        read += f", and of {process.expert_bytes / 1e9:.3f} GB of experts those that it names"
    text = f"  {process.name} {process.version}: {read}"
    if process.held_bytes:
        text += (
            f"; in memory {process.rss / 1e9:.2f} GB:"
            f" weights and KV cache {process.held_bytes / 1e9:.2f} GB,"
            f" Python and torch before loading {process.rss_imported / 1e9:.2f} GB"
        )
    return text


def _line(row: Row, beside: list[Row]) -> str:
    versus = ""
    for ours in beside:
        if ours.contender == "radix" and row is not ours:
            ratios = [a / b for a, b in zip(ours.rates, row.rates, strict=True)]
            spread = f"{min(ratios):.2f}..{max(ratios):.2f}"
            versus = f"  radix is {statistics.median(ratios):.2f}x ({spread})"
    share = f"{row.of_probe:6.0%} of probe" if row.work.kind == "decode" else " " * 15
    return (
        f"{row.weights:5s} {row.work.name:24s} {row.contender:13s}{row.rate:9.1f} tok/s "
        f"({min(row.rates):.1f}..{max(row.rates):.1f}) {share}"
        f"  probe {statistics.median(row.probes):.1f} GB/s{versus}"
    )


def _report(rows: list[Row], args: argparse.Namespace) -> dict[str, object]:
    return {
        "date": str(datetime.date.today()),
        "machine": cpu_name(),
        "threads": args.threads,
        "model": args.model.name,
        "rows": [{**asdict(row), "median": row.rate, "of_probe": row.of_probe} for row in rows],
    }


def cpu_name() -> str:
    """Of the processor, as Linux tells it."""
    match = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
    return match[1] if match else platform.processor()
