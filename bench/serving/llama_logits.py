"""llama.cpp's log-probabilities of given tokens, by the prebuilt library in the package
llama-cpp-py-sync (`pip install llama-cpp-py-sync`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


class LlamaLogits:
    """A GGUF file in llama.cpp. Raises ImportError where the package is not installed."""

    def __init__(self, model: Path, *, window: int, threads: int) -> None:
        """window: the tokens that a call has at most."""
        from llama_cpp_py_sync import (  # type: ignore[import-not-found,unused-ignore]
            Llama,
            _cffi_bindings,
        )

        self._lib: Any = _cffi_bindings.get_lib()
        self._ffi: Any = _cffi_bindings.get_ffi()
        self._quiet = self._ffi.callback(
            "void(enum ggml_log_level, const char *, void *)", lambda level, text, data: None
        )
        self._lib.llama_log_set(self._quiet, self._ffi.NULL)
        self._llama = Llama(
            str(model), n_ctx=window, n_batch=window, n_ubatch=window, n_threads=threads
        )

    def system_info(self) -> str:
        """What the library uses of this machine, as it says itself."""
        return str(self._llama.print_system_info()).strip()

    def logprobs(self, ids: list[int]) -> np.ndarray:
        """ids: the tokens of one sequence. The log-probability of each but the first, float64
        [len(ids) - 1]."""
        self._llama._clear_context_state()
        batch = self._lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place] = token
            batch.pos[place] = place
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = 0
            batch.logits[place] = 1
        status = self._lib.llama_decode(self._llama._ctx, batch)
        self._lib.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode: {status}")
        return np.array(
            [self._logprob(place, token) for place, token in enumerate(ids[1:])], dtype=np.float64
        )

    def _logprob(self, place: int, token: int) -> float:
        """Of `token` after the one at `place`."""
        row = self._lib.llama_get_logits_ith(self._llama._ctx, place)
        data = self._ffi.buffer(row, 4 * self._llama.n_vocab)
        logits = np.frombuffer(data, dtype=np.float32).astype(np.float64)
        highest = logits.max()
        return float(logits[token] - highest - np.log(np.exp(logits - highest).sum()))
