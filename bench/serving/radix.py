"""Our engine as a contender."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from radix_runtime.layers.weight import weight_bytes
from radix_runtime.offline import Engine

from .contender import FILE_WEIGHTS, Serving

_QUANTIZATION = {"bf16": None, "int8": "int8", "int4": "int4", FILE_WEIGHTS: None}
_TOKENS = 16384  # of KV cache
_EXPERT = re.compile(r"\.experts\.\d+\.")


class Model(Serving):
    """Our engine with dummy weights or those of a file, in this process."""

    weight_bytes = 0

    def __init__(self, folder: Path, weights: str, threads: int) -> None:
        import radix_kernels
        import radix_runtime

        self._engine = Engine(
            folder,
            device="cpu",
            dtype="bfloat16",
            load_format="safetensors" if weights == FILE_WEIGHTS else "dummy",
            quantization=_QUANTIZATION[weights],
            num_threads=threads,
            max_total_tokens=_TOKENS,
            max_running_requests=32,
            skip_tokenizer_init=True,
        )
        isa = radix_kernels.capabilities()["isa"]
        self.version = f"{radix_runtime.__version__} ({isa})"
        self.runner: Any = self._engine.executor.runner
        model: Any = self.runner.model
        for name, module in model.named_modules():
            if _EXPERT.search(name):
                self.expert_bytes += _packed_bytes(module)
            elif module is not model.model.embed_tokens or model.lm_head is None:
                self.weight_bytes += _packed_bytes(module)
        pool = self.runner.kv_pool
        self.held_bytes = weight_bytes(model) + sum(x.nbytes for x in pool.tensors())

    def generate(self, prompts: list[list[int]], count: int) -> float:
        start = time.perf_counter()
        params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        self._engine.generate(input_ids=prompts, sampling_params=params)
        return time.perf_counter() - start


def _packed_bytes(module: Any) -> int:
    weight = getattr(module, "weight", None)
    return 0 if weight is None or len(weight.shape) != 2 else int(weight.nbytes)
