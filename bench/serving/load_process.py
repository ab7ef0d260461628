"""The process of a turn of `bench.serving load`: prints its figures as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from radix_runtime import ops
from radix_runtime.engine import model_runner
from radix_runtime.layers.weight import weight_bytes
from radix_runtime.models.loader import load_model
from radix_runtime.offline import Engine

_CHUNK = 16 << 20  # bytes of a read
_TOKENS = 1024  # of KV cache
_SETTLE_SECONDS = 0.1  # in which the memory before loading is seen


def main() -> None:
    folder, quantization, threads = sys.argv[1:]
    files = sorted(Path(folder).glob("*.safetensors"))
    _read(files, int(threads))  # into the page cache
    facts: dict[str, Any] = {"file_bytes": sum(file.stat().st_size for file in files)}
    facts["read_seconds"] = _read(files, int(threads))

    def timed(*args: Any) -> Any:
        time.sleep(_SETTLE_SECONDS)
        facts["begin"] = time.monotonic()
        model = load_model(*args)
        facts["end"] = time.monotonic()
        return model

    vars(model_runner)["load_model"] = timed
    engine = Engine(
        folder,
        device="cpu",
        dtype="bfloat16",
        quantization=None if quantization == "none" else quantization,
        num_threads=int(threads),
        max_total_tokens=_TOKENS,
        max_running_requests=1,
        skip_tokenizer_init=True,
    )
    runner: Any = engine.executor.runner
    facts["load_seconds"] = facts["end"] - facts["begin"]
    facts["weight_bytes"] = weight_bytes(runner.model)
    facts["pack_seconds"] = _pack(runner.model)
    print(json.dumps(facts), flush=True)
    engine.shutdown()


def _read(files: list[Path], threads: int) -> float:
    """Seconds of reading all bytes, a thread a core."""
    pieces = [(file, at) for file in files for at in range(0, file.stat().st_size, _CHUNK)]
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(_read_pieces, [pieces[first::threads] for first in range(threads)]))
    return time.perf_counter() - start


def _read_pieces(pieces: list[tuple[Path, int]]) -> None:
    buffer = bytearray(_CHUNK)
    opened: dict[Path, int] = {}
    for file, at in pieces:
        if file not in opened:
            opened[file] = os.open(file, os.O_RDONLY)
        os.preadv(opened[file], [buffer], at)
    for descriptor in opened.values():
        os.close(descriptor)


def _pack(model: torch.nn.Module) -> float:
    """Seconds of packing all weights that the model holds packed, from memory."""
    weights = [getattr(module, "weight", None) for module in model.modules()]
    packed = [weight for weight in weights if isinstance(weight, ops.PackedWeight)]
    seconds = 0.0
    for (shape, kind), count in Counter((tuple(w.shape), w.kind) for w in packed).items():
        source = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02)
        start = time.perf_counter()
        for _ in range(count):
            ops.pack_weight(source, kind=kind)
        seconds += time.perf_counter() - start
    return seconds


if __name__ == "__main__":
    main()
