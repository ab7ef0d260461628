"""`python -m bench.gpu_runtime MODEL...`: an engine with random weights on one GPU, work by work.

MODEL is a folder with a config.json, or the name of one in bench/serving/models. Every arm has a
process of its own and does all works of a model in turn; a work that takes longer than its limit
ends the process, and the rest go on in a new one. What an arm has not begun when --seconds are over
is left out. --json is written after every work. With --serve the engine is behind HTTP.

    python -m bench.gpu_runtime qwen3-0.6b llama3-8b --json figures.json
    python -m bench.gpu_runtime qwen3-0.6b --arm radix --arm radix-eager:disable_cuda_graph=true
    python -m bench.gpu_runtime qwen3-0.6b --only step --batches 1 64
    python -m bench.gpu_runtime llama3-70b --tp 4 --only offline --repeats 1
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.serving.model_shape import ModelShape
from radix_runtime.cli.figures import machine
from radix_runtime.cli.output_file import output_file

from .contender import MODULES, Arm, EngineSizes
from .floors import DENSE, Gpu, decode_floor_ms
from .gpu_watch import gpu_name, watched_gpu
from .models import model_folder
from .process import ROOT, ArmProcess, Failed
from .report import markdown, short
from .serving import Load, ServerProcess, table_loads
from .stages import STEP_PROMPT, Figures, Stage, table_stages

_WORKLOAD = ROOT / "bench/serving/workloads/offline256.json"
_CONVERSATIONS = ROOT / "bench/serving/workloads/sharegpt1000.json"
_BATCHES = [1, 8, 32, 64, 128, 256]
_START_LIMITS = {"radix": 90.0, "vllm": 400.0}  # seconds until an engine has given a token
_SECONDS = {"radix": 120.0, "vllm": 600.0}
_SERVE_SECONDS = 300.0


class Run:
    """The figures so far, and where they are written."""

    def __init__(self, json_file: Path | None) -> None:
        self._file = json_file
        self._report: dict[str, Any] = {**machine(), "gpu": gpu_name(), "rows": []}

    def add(self, model: str, arm: Arm, stage: str, figures: Figures) -> None:
        """Keeps, prints and writes the figures of one work."""
        row = {"model": model, "arm": arm.name, "stage": stage, "figures": figures}
        self._report["rows"].append(row)
        print(f"{model:12} {arm.name:14} {stage:18} {short(figures)}", flush=True)
        if "error" in figures:
            print(f"    {figures['error']}", flush=True)
        if self._file is not None:
            self._file.write_text(json.dumps(self._report, indent=1) + "\n")

    def table(self) -> str:
        """All of it as Markdown."""
        return markdown(self._report)


def main() -> None:
    args = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the engine
    run = Run(args.json)
    for model in args.models:
        for arm in _arms(args.arm):
            measure(run, arm, model, args)
    print("\n" + run.table(), end="")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_runtime",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", type=model_folder, nargs="+", metavar="MODEL")
    parser.add_argument(
        "--arm",
        type=Arm.parse,
        action="append",
        metavar="ENGINE[-NAME][:FIELD=VALUE,...]",
        help="an engine with settings of its own; default: radix, and vllm where it is installed",
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures there")
    _add_works(parser)
    gpu = Gpu()
    parser.add_argument("--read-gbs", type=float, default=gpu.read_gbs, help="of the floors")
    parser.add_argument("--tflops", type=float, default=gpu.tflops, help="of the floors, bfloat16")
    sizes = EngineSizes()
    parser.add_argument("--max-rows", type=int, default=sizes.max_rows)
    parser.add_argument("--chunk", type=int, default=sizes.chunk, help="tokens of a step")
    parser.add_argument("--context", type=int, default=sizes.context)
    parser.add_argument("--memory-share", type=float, default=sizes.memory_share)
    parser.add_argument(
        "--tensor-parallel-size", "--tp", dest="ranks", type=int, default=sizes.ranks, metavar="N"
    )
    return parser


def _add_works(parser: argparse.ArgumentParser) -> None:
    """What is run, and for how long."""
    parser.add_argument("--workload", type=Path, default=_WORKLOAD, help="of the offline work")
    parser.add_argument(
        "--serve", action="store_true", help="the works over HTTP, by `radix bench serve`"
    )
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="works whose kind or name has it")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=_BATCHES, help="rows of the decode steps"
    )
    parser.add_argument(
        "--step-prompt",
        type=int,
        default=STEP_PROMPT,
        metavar="TOKENS",
        help="of every row before the decode steps (with --context and --patience if long)",
    )
    parser.add_argument("--repeats", type=int, help="of every work")
    parser.add_argument(
        "--seconds", type=float, help=f"of an arm and model; default: {_SECONDS} by engine"
    )
    parser.add_argument(
        "--start-seconds",
        type=float,
        help=f"until an engine has given a token; default: {_START_LIMITS} by engine",
    )
    parser.add_argument(
        "--patience", type=float, default=1.0, metavar="TIMES", help="by which works take longer"
    )


def _arms(given: list[Arm] | None) -> list[Arm]:
    """The arms that can run here; says which cannot."""
    found = []
    for arm in given or [Arm(name=name, engine=name) for name in MODULES]:
        if arm.engine == "radix" or importlib.util.find_spec(arm.engine) is not None:
            found.append(arm)
        else:
            print(f"{arm.name}: {arm.engine} is not installed, skipped", flush=True)
    return found


def measure(run: Run, arm: Arm, folder: Path, args: argparse.Namespace) -> None:
    """All works of one arm with one model, in as many processes as it takes."""
    usual = _SERVE_SECONDS if args.serve else _SECONDS[arm.engine]
    end = time.monotonic() + (args.seconds or usual)
    works: list[Any] = _loads(args) if args.serve else _stages(args)
    kind: Any = ServerProcess if args.serve else ArmProcess
    sizes = EngineSizes(
        max_rows=args.max_rows,
        chunk=args.chunk,
        context=args.context,
        memory_share=args.memory_share,
        ranks=args.ranks,
    )
    while works:
        process = kind(arm=arm, folder=folder, sizes=sizes)
        try:
            run.add(folder.name, arm, "start", process.facts(_start_limit(arm, args)))
            _measure_works(run, arm, folder, args, process=process, works=works, end=end)
        except Failed as failure:
            run.add(folder.name, arm, "start", {"error": str(failure)})
            return
        except SystemExit:
            process.kill()
            raise
        finally:
            process.close()


def _start_limit(arm: Arm, args: argparse.Namespace) -> float:
    return float(args.start_seconds or _START_LIMITS[arm.engine])


def _measure_works(
    run: Run,
    arm: Arm,
    folder: Path,
    args: argparse.Namespace,
    *,
    process: Any,
    works: list[Any],
    end: float,
) -> None:
    """Takes works from the list until it is empty or the process has ended."""
    while works:
        work = works.pop(0)
        left = end - time.monotonic()
        if left <= 0:
            run.add(folder.name, arm, work.name, {"error": "no time left"})
            continue
        try:
            with watched_gpu() as seen:
                figures = process.run(replace(work, limit=min(work.limit, left)))
        except Failed as failure:
            run.add(folder.name, arm, work.name, {"error": str(failure)})
            return
        run.add(folder.name, arm, work.name, {**figures, **seen, **_floor(work, folder, args)})


def _floor(work: Any, folder: Path, args: argparse.Namespace) -> Figures:
    """What one GPU of the flags would need at least, where that is known: with weights in 16
    bits."""
    if args.serve or work.kind != "step" or args.ranks > 1:
        return {}
    if "quantization_config" in json.loads((folder / "config.json").read_text()):
        return {}
    gpu = Gpu(read_gbs=args.read_gbs, tflops=args.tflops)
    try:
        shape = ModelShape.read(folder)
    except ValueError:
        return {}
    if shape.model_type not in DENSE:
        return {}
    return {"floor_ms": decode_floor_ms(shape, work.size, context=work.step_context, gpu=gpu)}


def _loads(args: argparse.Namespace) -> list[Load]:
    loads = table_loads(args.workload, _CONVERSATIONS)
    return [load for load in loads if any(text in load.name for text in args.only or [""])]


def _stages(args: argparse.Namespace) -> list[Stage]:
    stages = table_stages(args.workload, args.batches, args.step_prompt)
    if args.only:
        stages = [
            stage
            for stage in stages
            if any(text == stage.kind or text in stage.name for text in args.only)
        ]
    if args.repeats:
        stages = [replace(stage, repeats=args.repeats) for stage in stages]
    return [replace(stage, limit=stage.limit * args.patience) for stage in stages]


if __name__ == "__main__":
    main()
