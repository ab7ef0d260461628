"""`python -m bench.serving load`: loading a checkpoint and packing its weights on the CPU, beside
reading its files alone and packing alone, and the memory that it takes meanwhile.

The checkpoint is of random bfloat16 weights, in shards as transformers cuts them, and is written
once into --folder. Every turn is a process of its own on --threads cores: it reads the files (they
are in the page cache then), loads the model, and packs weights of the model's shapes that lie in
memory. Memory is the process's own, as it is every 10 ms; pages of the files are the system's.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from radix_runtime.cli.output_file import output_file

from .checkpoint_file import write_checkpoint
from .contender import ROOT
from .cpu import cpu_name, cut_layers

MODEL = ROOT / "bench/serving/models/llama3-8b"
FOLDER = ROOT / "build/checkpoints"
_SAMPLE_SECONDS = 0.01
_GOAL_SHARE = 0.9  # of the slower of both
_GOAL_BYTES = 1e9  # above what is held in the end


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.serving load", description=__doc__)
    parser.add_argument(
        "--model", type=Path, default=MODEL, help="folder with a config.json (llama or qwen3)"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="the first N layers of it")
    parser.add_argument("--quantization", default="int4", choices=["int4", "int8", "none"])
    parser.add_argument("--threads", type=int, default=2, help="cores (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="processes (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of checkpoints")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures there")
    args = parser.parse_args(argv)
    if args.layers is not None:
        args.model = cut_layers(args.model, args.layers)
    checkpoint = args.folder / args.model.name
    size = write_checkpoint(checkpoint, args.model)
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    what = f"{args.model.name} {size / 1e9:.1f} GB"
    print(f"{datetime.date.today()}  {cpu_name()}, cores {cores}  {what}")
    turns = []
    for _ in range(args.turns):
        turns.append(_turn(checkpoint, args.quantization, cores))
        print(_line(turns[-1]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(_report(args, turns), indent=1) + "\n")
    print(_summary(turns))


def _turn(checkpoint: Path, quantization: str, cores: list[int]) -> dict[str, Any]:
    """What a process of its own measures, and its memory beside it."""
    command = [sys.executable, "-m", "bench.serving.load_process", str(checkpoint), quantization]
    process = subprocess.Popen(
        [*command, str(len(cores))],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    samples: list[tuple[float, int]] = []
    sampler = threading.Thread(target=_sample, args=(process, samples), daemon=True)
    sampler.start()
    assert process.stdout is not None
    lines = [line for line in process.stdout if line.startswith("{")]
    status = process.wait()
    sampler.join()
    if status or not lines:
        raise SystemExit(f"the process ended with {status}")
    facts: dict[str, Any] = json.loads(lines[-1])
    before = [held for at, held in samples if at < facts["begin"]]
    during = [held for at, held in samples if facts["begin"] <= at <= facts["end"]]
    if not before or not during:
        raise SystemExit("the load was too short for its memory to be seen: take a larger model")
    facts["peak_bytes"] = max(during) - before[-1]
    facts["over_final_bytes"] = facts["peak_bytes"] - facts["weight_bytes"]
    return facts


def _sample(process: subprocess.Popen[str], samples: list[tuple[float, int]]) -> None:
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        with contextlib.suppress(OSError):  # it may have ended since
            match = re.search(r"^RssAnon:\s+(\d+) kB", status.read_text(), re.M)
            if match:
                samples.append((time.monotonic(), int(match[1]) * 1024))
        time.sleep(_SAMPLE_SECONDS)


def _share(turn: dict[str, Any]) -> float:
    """Of the rate of the slower of reading and packing, that loading reaches."""
    slower = max(turn["read_seconds"], turn["pack_seconds"])
    return float(slower / turn["load_seconds"])


def _line(turn: dict[str, Any]) -> str:
    rates = [
        turn["file_bytes"] / turn[f"{name}_seconds"] / 1e9 for name in ("read", "pack", "load")
    ]
    return (
        f"  read {rates[0]:.2f} GB/s, pack {rates[1]:.2f}, load {rates[2]:.2f} of the files "
        f"({turn['load_seconds']:.1f} s): {_share(turn):.0%} of the slower; at most "
        f"{turn['over_final_bytes'] / 1e9:.2f} GB above the {turn['weight_bytes'] / 1e9:.2f} held"
    )


def _summary(turns: list[dict[str, Any]]) -> str:
    share = statistics.median(_share(turn) for turn in turns)
    most = max(turn["over_final_bytes"] for turn in turns)
    return (
        f"load at {share:.0%} of the slower (goal {_GOAL_SHARE:.0%}), at most {most / 1e9:.2f} GB "
        f"above the final size (goal {_GOAL_BYTES / 1e9:.0f})"
    )


def _report(args: argparse.Namespace, turns: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "date": str(datetime.date.today()),
        "machine": cpu_name(),
        "threads": args.threads,
        "model": args.model.name,
        "quantization": args.quantization,
        "share_of_slower": statistics.median(_share(turn) for turn in turns),
        "over_final_bytes": max(turn["over_final_bytes"] for turn in turns),
        "turns": turns,
    }
