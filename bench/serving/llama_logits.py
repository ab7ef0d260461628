"""llama.cpp's logits of given tokens, through the low-level binding of llama-cpp-python as
`python -m bench.peers_cpu.build` leaves it."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers_cpu.build import FOLDER, VERSION

_F32 = 0  # ggml's number of the type


class LlamaLogits:
    """A GGUF file in llama.cpp. Raises ImportError where it has not been built, ValueError for a
    file that it cannot load."""

    def __init__(self, model: Path, *, window: int, threads: int, exact: bool = False) -> None:
        """window: the tokens that a call has at most. exact: keys and values in float32, and no
        flash attention."""
        self._lib = library()
        self._model = self._lib.llama_model_load_from_file(
            str(model).encode(), self._lib.llama_model_default_params()
        )
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {model}")
        vocabulary = self._lib.llama_model_get_vocab(self._model)
        self._vocab_size = self._lib.llama_vocab_n_tokens(vocabulary)
        params = self._lib.llama_context_default_params()
        for name in ("n_ctx", "n_batch", "n_ubatch"):
            setattr(params, name, window)
        for name in ("n_threads", "n_threads_batch"):
            setattr(params, name, threads)
        if exact:
            params.type_k = _F32
            params.type_v = _F32
            params.flash_attn_type = 0
        self._context = self._lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError(f"llama.cpp has no context of {window} tokens for {model}")

    def close(self) -> None:
        """Gives its memory back."""
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def system_info(self) -> str:
        """Which llama.cpp, and what it uses of this machine, as it says itself."""
        used = self._lib.llama_print_system_info().decode().strip()
        return f"{VERSION}: {used}"

    def logits(self, ids: list[int]) -> np.ndarray:
        """ids: the tokens of one sequence. Float32 [len(ids), vocabulary]."""
        lib = self._lib
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        batch = lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place] = token
            batch.pos[place] = place
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = 0
            batch.logits[place] = 1
        status = lib.llama_decode(self._context, batch)
        lib.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode: {status}")
        rows = [lib.llama_get_logits_ith(self._context, place) for place in range(len(ids))]
        shape = (self._vocab_size,)
        return np.stack([np.ctypeslib.as_array(row, shape).copy() for row in rows])

    def logprobs(self, ids: list[int]) -> np.ndarray:
        """The log-probability of each token of a sequence but the first, float64 [len(ids) - 1]."""
        found = []
        for row, token in zip(self.logits(ids), ids[1:], strict=False):
            values = row.astype(np.float64)
            highest = values.max()
            found.append(values[token] - highest - np.log(np.exp(values - highest).sum()))
        return np.array(found)


@cache
def library() -> Any:
    """The binding, which says nothing. Raises ImportError where it has not been built."""
    sys.path.insert(0, str(FOLDER))
    try:
        import llama_cpp.llama_cpp as loaded
    finally:
        sys.path.remove(str(FOLDER))
    loaded.quiet = loaded.llama_log_callback(lambda level, text, data: None)  # kept alive
    loaded.llama_log_set(loaded.quiet, ctypes.c_void_p())
    loaded.llama_backend_init()
    return loaded
