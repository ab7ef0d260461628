"""vLLM's offline engine as a contender."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .contender import Contender, EngineSizes, Prompt
from .vllm_weights import LOAD_FORMAT, python_path, write_metadata


class Model(Contender):
    """`vllm.LLM` without a tokenizer, with its own defaults for all but the sizes and the random
    weights, which are drawn as ours are."""

    def __init__(self, folder: Path, sizes: EngineSizes, settings: dict[str, Any]) -> None:
        self._metadata = tempfile.TemporaryDirectory()
        metadata = Path(self._metadata.name)
        write_metadata(metadata)
        sys.path.append(str(metadata))
        os.environ |= {
            "PYTHONPATH": python_path(metadata),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        import torch
        import vllm

        defaults: dict[str, Any] = {
            "load_format": LOAD_FORMAT,
            "skip_tokenizer_init": True,
            "max_model_len": sizes.context,
            "gpu_memory_utilization": sizes.memory_share,
            "max_num_seqs": sizes.max_rows,
            "max_num_batched_tokens": sizes.chunk,
            "tensor_parallel_size": sizes.ranks,
        }
        options = {**defaults, **settings}
        self._engine = vllm.LLM(str(folder), **options)
        self._params: Any = vllm.SamplingParams
        self.version = (
            f"{vllm.__version__}, torch {torch.__version__}, weights {options['load_format']}"
        )

    def generate(self, prompts: list[Prompt], lengths: Sequence[int], temperature: float) -> int:
        outputs = self._outputs(prompts, lengths, temperature)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def chosen_experts(self, prompts: list[Prompt], length: int, temperature: float) -> np.ndarray:
        outputs = self._outputs(prompts, [length] * len(prompts), temperature)
        found = [output.outputs[0].routed_experts for output in outputs]
        if any(ids is None for ids in found):
            raise RuntimeError("vLLM returned no experts: enable_return_routed_experts is off")
        rows = [ids[len(prompt) :] for ids, prompt in zip(found, prompts, strict=True)]
        return np.stack(rows, axis=2).astype(np.int64)

    def _outputs(
        self, prompts: list[Prompt], lengths: Sequence[int], temperature: float
    ) -> list[Any]:
        params = [
            self._params(
                temperature=temperature, max_tokens=length, ignore_eos=True, detokenize=False
            )
            for length in lengths
        ]
        outputs: list[Any] = self._engine.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
        return outputs
