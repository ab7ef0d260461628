"""What `radix doctor` says that a model takes, beside what an engine with it really allocates.

    python -m tests.gpu.doctor_memory [--models llama3-8b path/to/model ...] [--device cuda]

Each model has a process of its own, in which `Engine` loads random weights. Weights and KV cache
are what torch's allocator had to give for them (on a CPU: what the process's own memory grew by,
with --held what the engine counts, as a small model is lost in the rest); the doctor's figures are
read from the table that it prints. "steps" is what the largest steps and CUDA graphs keep, which
the doctor does not say. A line a model; exit status 1 where weights or KV cache differ by more than
3 %.

The six dense models and mixtures are those that the benches share; the 70B in FP8 and gpt-oss with
its experts in MXFP4 are the largest that one H200 holds and the model that mixes most formats.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from radix_runtime import Engine
from radix_runtime.engine import model_runner
from radix_runtime.engine.facts import engine_facts

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "bench/serving/models"
DEFAULT = (
    "qwen3-0.6b",
    "qwen3-8b",
    "qwen3-14b",
    "llama3-8b",
    "dsv2-lite",
    "qwen3-30b-a3b",
    "llama3-70b-fp8",
    "gpt-oss-20b-mxfp4",
)
CLOSE = 0.03
SECONDS = 300  # of a model
_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.doctor_memory", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(DEFAULT), metavar="MODEL")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--held", action="store_true", help="what the engine counts (CPU)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(_allocated(args.one, args.device, held=args.held)), flush=True)
        return
    rows: dict[str, Figures | str] = {}
    wrong = 0
    for name in args.models:
        rows[name] = _row(name, args)
        if not _is_close(rows[name]):
            wrong += 1
        print(_line(name, rows[name]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{len(rows) - wrong} of {len(rows)} models within {CLOSE:.0%}")
    sys.exit(1 if wrong else 0)


def _row(name: str, args: argparse.Namespace) -> Figures | str:
    """Bytes, or why there are none."""
    folder = _folder(name)
    command = [sys.executable, "-m", "tests.gpu.doctor_memory", "--one", folder]
    command += ["--device", args.device, *(["--held"] if args.held else [])]
    said = _ran([sys.executable, "-m", "radix_runtime.cli", "doctor", folder,
                 "--device", args.device])  # fmt: skip
    done = _ran(command)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return f"engine: {done.stderr.strip()[-400:]}"
    found: Figures = json.loads(lines[-1])
    weights = re.search(r"^weights of a rank +TP 1 ([\d.]+) (MiB|GiB)", said.stdout, re.M)
    token = re.search(r"^KV cache +([\d.]+) KiB a token", said.stdout, re.M)
    if weights is None or token is None:
        return f"doctor: {(said.stdout + said.stderr).strip()[-400:]}"
    found["said_weights"] = float(weights[1]) * _UNITS[weights[2]]
    found["said_kv"] = float(token[1]) * 1024 * found["tokens"]
    return found


def _folder(name: str) -> str:
    return str(MODELS / name) if (MODELS / name).exists() else name


def _ran(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(
            args=command, returncode=124, stdout="", stderr=f"took longer than {SECONDS} s"
        )


def _allocated(folder: str, device: str, *, held: bool) -> Figures:
    """Bytes that an engine has allocated for each part, and the tokens that its cache holds, the
    dummy page's among them."""
    taken: dict[str, int] = {}

    def measured(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            before = _in_use(device)
            made = make(*args, **options)
            taken[name] = _in_use(device) - before
            return made

        return run

    for part in ("load_model", "KVPool"):  # of two pools the first is a trial
        vars(model_runner)[part] = measured(part, getattr(model_runner, part))
    limits: dict[str, Any] = {}
    if device == "cpu":  # RoPE tables are as long as the cache
        limits = {"max_total_tokens": _context(folder), "num_threads": 1}
    with Engine(
        folder, device=device, load_format="dummy", skip_tokenizer_init=True, **limits
    ) as engine:
        runner: Any = engine.executor.runner  # type: ignore[attr-defined]
        facts = engine_facts(runner)
        pages = runner.kv_pool.num_pages + 1
        figures = {
            "weights": float(taken["load_model"]),
            "kv": float(taken["KVPool"]),
            "tokens": float(pages * engine.args.page_size),
            "steps": float(facts["step_bytes"] or 0),
            "graphs": float(facts["cuda_graphs"] or 0),
        }
        if held:
            figures["weights"] = float(facts["weight_bytes"] or 0)
            figures["kv"] = float(facts["kv_cache_bytes"] or 0)
        return figures


def _context(folder: str) -> int:
    config = json.loads((Path(folder) / "config.json").read_text())
    return int(config["max_position_embeddings"])


def _in_use(device: str) -> int:
    """Bytes of live tensors on a GPU; of the process's own memory on a CPU."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)
    match = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert match is not None
    return int(match[1]) * 1024


def _is_close(row: Figures | str) -> bool:
    if isinstance(row, str):
        return False
    return all(abs(row[f"said_{part}"] / row[part] - 1) <= CLOSE for part in ("weights", "kv"))


def _line(name: str, row: Figures | str) -> str:
    if isinstance(row, str):
        return f"{name}: FAILED, {row}"
    gib = {key: value / (1 << 30) for key, value in row.items()}
    parts = [
        f"{part} {gib[part]:.3f} GiB, said {gib[f'said_{part}']:.3f} "
        f"({row[f'said_{part}'] / row[part] - 1:+.1%})"
        for part in ("weights", "kv")
    ]
    steps = f"steps and {row['graphs']:.0f} graphs {gib['steps']:.3f} GiB"
    verdict = "" if _is_close(row) else "  WRONG"
    return f"{name}: {'; '.join(parts)}; {steps}{verdict}"


if __name__ == "__main__":
    main()
