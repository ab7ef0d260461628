"""llama.cpp as a contender, through the low-level binding of llama-cpp-python as `build` leaves
it."""

from __future__ import annotations

import ctypes
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.serving.contender import FILE_WEIGHTS, Contender

from . import gguf_file
from .build import FOLDER, LEVELS, VERSION, package_folder

_MICRO_BATCH = 512


class Model(Contender):
    """llama.cpp over a GGUF file: one that is given, or of random weights, which is written
    first. Built for the level that RADIX_CPU_ISA lowers our kernels to, or else for this machine.
    """

    def __init__(self, folder: Path, weights: str, threads: int) -> None:
        sys.path.insert(0, str(_package()))
        import llama_cpp.llama_cpp as library

        self._lib = library
        self._threads = threads
        self._quiet = library.llama_log_callback(lambda level, text, data: None)
        library.llama_log_set(self._quiet, ctypes.c_void_p())
        library.llama_backend_init()
        path = folder
        self.weight_bytes = 0
        if weights != FILE_WEIGHTS:
            path = FOLDER / f"{folder.name}-{weights}.gguf"
            read = gguf_file.written(path, folder, weights)
            self.weight_bytes = read.dense
            self.expert_bytes = read.experts
        self._model = library.llama_model_load_from_file(
            str(path).encode(), library.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self._shape: tuple[int, int] | None = None
        self._context: Any = None
        self.version = f"{VERSION} ({_features(library)})"

    def prefill(self, tokens: int) -> float:
        self._open(1, 0, tokens)
        self._lib.llama_memory_clear(self._memory, False)
        start = time.perf_counter()
        self._run([(t, p, 0) for p, t in enumerate(_ids(tokens))], [tokens - 1])
        return time.perf_counter() - start

    def decode(self, batch: int, context: int, steps: int) -> float:
        if self._open(batch, context, context + steps):
            self._run([(t, p, 0) for p, t in enumerate(_ids(context))], [context - 1])
            for row in range(1, batch):  # the same prompt, in memory of its own
                self._lib.llama_memory_seq_cp(self._memory, 0, row, -1, -1)
        for row in range(batch):
            self._lib.llama_memory_seq_rm(self._memory, row, context, -1)
        following = _ids(batch)
        start = time.perf_counter()
        for step in range(steps):
            following = self._run(
                [(t, context + step, row) for row, t in enumerate(following)], range(batch)
            )
        return time.perf_counter() - start

    def _open(self, batch: int, context: int, length: int) -> bool:
        """A context for `batch` sequences of up to `length` tokens; True when it is new and without
        their prompts."""
        if self._shape == (batch, context):
            return False
        if self._context is not None:
            self._lib.llama_free(self._context)
        params = self._lib.llama_context_default_params()
        length = -(-length // 256) * 256
        params.n_ctx = batch * length
        params.n_seq_max = batch
        params.kv_unified = False
        params.n_batch = max(length, batch)
        params.n_ubatch = _MICRO_BATCH
        params.n_threads = self._threads
        params.n_threads_batch = self._threads
        self._context = self._lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp: no context for {batch} x {length} tokens")
        self._memory = self._lib.llama_get_memory(self._context)
        self._shape = (batch, context)
        return True

    def _run(self, tokens: list[tuple[int, int, int]], wanted: Any) -> list[int]:
        """tokens: (id, position, sequence); the greedy tokens after those of the indices
        `wanted`."""
        batch = self._lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.logits[i] = i in wanted
            batch.seq_id[i][0] = sequence
        status = self._lib.llama_decode(self._context, batch)
        self._lib.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode: {status}")
        rows = (self._lib.llama_get_logits_ith(self._context, i) for i in wanted)
        return [int(np.ctypeslib.as_array(row, (self._vocab,)).argmax()) for row in rows]


def _package() -> Path:
    """Raises ValueError where the level has no build."""
    level = os.environ.get("RADIX_CPU_ISA") or None
    if level is not None and level not in LEVELS:
        raise ValueError(f"RADIX_CPU_ISA={level}: llama.cpp is built for {', '.join(LEVELS)}")
    folder = package_folder(level)
    if not (folder / "llama_cpp").exists():
        option = f" --level {level}" if level else ""
        raise ValueError(f"{folder} is not there: python -m bench.peers_cpu.build{option}")
    return folder


def _ids(count: int) -> list[int]:
    return [random.randrange(10_000) for _ in range(count)]


def _features(library: Any) -> str:
    """What the build uses of this machine, as llama.cpp says itself."""
    text = library.llama_print_system_info().decode()
    return ", ".join(
        part.split("=")[0].strip()
        for part in text.replace(":", "|").split("|")
        if part.strip().endswith("= 1")
    )
