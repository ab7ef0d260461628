"""vLLM's offline engine as a contender."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .contender import Contender, EngineSizes, Prompt


class Model(Contender):
    """`vllm.LLM` without a tokenizer, with its own defaults for all but the sizes."""

    def __init__(self, folder: Path, sizes: EngineSizes, settings: dict[str, Any]) -> None:
        os.environ |= {
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        import torch
        import vllm

        defaults: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": sizes.context,
            "gpu_memory_utilization": sizes.memory_share,
            "max_num_seqs": sizes.max_rows,
            "max_num_batched_tokens": sizes.chunk,
            "tensor_parallel_size": sizes.ranks,
        }
        self._engine = vllm.LLM(str(folder), **{**defaults, **settings})
        self._params: Any = vllm.SamplingParams
        self.version = f"{vllm.__version__}, torch {torch.__version__}"

    def generate(self, prompts: list[Prompt], lengths: Sequence[int], temperature: float) -> int:
        params = [
            self._params(
                temperature=temperature, max_tokens=length, ignore_eos=True, detokenize=False
            )
            for length in lengths
        ]
        outputs = self._engine.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)
