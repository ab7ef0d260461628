"""Hugging Face transformers in eager mode, as a contender."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import transformers

from bench.serving.contender import Contender


class Model(Contender):
    """transformers with random bfloat16 weights and a DynamicCache."""

    def __init__(self, folder: Path, weights: str, threads: int) -> None:
        if weights != "bf16":
            raise ValueError(f"transformers has no {weights} weights for a CPU here")
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        config = transformers.AutoConfig.from_pretrained(folder)
        self._model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16
        ).eval()
        self._config = config
        self._cache: dict[tuple[int, int], transformers.DynamicCache] = {}
        self.version = f"{transformers.__version__}, torch {torch.__version__}, sdpa"
        layers = sum(p.nbytes for p in self._model.model.layers.parameters() if p.ndim == 2)
        self.weight_bytes = layers + self._model.lm_head.weight.nbytes

    def prefill(self, tokens: int) -> float:
        ids = torch.randint(0, 10_000, (1, tokens))
        start = time.perf_counter()
        self._model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1)
        return time.perf_counter() - start

    def decode(self, batch: int, context: int, steps: int) -> float:
        cache = self._cache.get((batch, context))
        ids = torch.randint(0, 10_000, (batch, context))
        if cache is None:
            cache = transformers.DynamicCache(config=self._config)
            self._cache[batch, context] = cache
            self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        following = ids[:, :1]
        start = time.perf_counter()
        for _ in range(steps):
            logits = self._model(following, past_key_values=cache, use_cache=True).logits
            following = logits[:, -1:].argmax(-1)
        seconds = time.perf_counter() - start
        cache.crop(-steps)
        return seconds
