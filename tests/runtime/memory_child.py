"""Prints [resident bytes before loading, after it, bytes of weights and KV cache] for the model in
a folder."""

from __future__ import annotations

import json
import sys

import psutil

from radix_runtime.offline import Engine

if __name__ == "__main__":
    process = psutil.Process()
    imported = process.memory_info().rss
    engine = Engine(
        sys.argv[1],
        device="cpu",
        dtype="bfloat16",
        load_format="dummy",
        num_threads=2,
        max_total_tokens=4096,
        max_running_requests=8,
    )
    loaded = process.memory_info().rss
    runner = engine.executor.runner  # type: ignore[attr-defined]
    weights = [getattr(module, "weight", None) for module in runner.model.modules()]
    tensors = [*weights, *runner.kv_pool.tensors()]
    print(json.dumps([imported, loaded, sum(int(x.nbytes) for x in tensors if x is not None)]))
    engine.shutdown()
