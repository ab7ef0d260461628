"""What a program that runs a model must do to be measured, and the process that it runs in.

Every contender lives in a process of its own with the same cores, and sleeps while another has its
turn.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import random
import re
import subprocess
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# Where `Model` of each is defined.
MODULES = {
    "radix": "bench.serving.radix",
    "radix serve": "bench.serving.server",
    "transformers": "bench.peers_cpu.transformers_model",
    "llama.cpp": "bench.peers_cpu.llama_model",
    "vllm": "bench.peers_cpu.vllm_model",
}
FILE_WEIGHTS = "gguf"  # as they are in a GGUF file, which takes the folder's place

# Interpreters of those that want packages which ours must not have.
INTERPRETERS = {"vllm": ROOT / "build/peers/vllm/bin/python"}


class Contender(ABC):
    """A model with random weights of the shape in `folder`/config.json, or of a GGUF file, on
    `threads` threads.

    weights: bf16, int8, int4, or FILE_WEIGHTS; raises ValueError for what it does not have.
    """

    version: str  # of the program, with what was changed
    weight_bytes: int  # read in a decode step: all layers and the head; 0: as "radix"
    expert_bytes = 0  # beside these: all experts of all layers, of which a step reads some
    held_bytes = 0  # what must be in memory: weights and the whole KV cache; 0: not known

    @abstractmethod
    def __init__(self, folder: Path, weights: str, threads: int) -> None: ...

    @abstractmethod
    def prefill(self, tokens: int) -> float:
        """Computes a new prompt up to its first token; seconds."""

    @abstractmethod
    def decode(self, batch: int, context: int, steps: int) -> float:
        """`steps` greedy tokens for each of `batch` sequences of `context` tokens; seconds without
        the prompts'."""

    def close(self) -> None:  # noqa: B027
        """Ends what the contender has started."""


class Serving(Contender):
    """A contender that takes whole requests and has a prefix cache."""

    vocabulary = 10_000
    _seeds = itertools.count()  # one contender a process

    @abstractmethod
    def generate(self, prompts: list[list[int]], count: int) -> float:
        """`count` greedy tokens for each prompt, whatever they are; seconds."""

    def prefill(self, tokens: int) -> float:
        return self.generate([self._prompt(next(self._seeds), tokens)], 1)

    def decode(self, batch: int, context: int, steps: int) -> float:
        prompts = [self._prompt(-1 - row, context) for row in range(batch)]
        # The prompts are in the prefix cache from the first call on: both others compute their last
        # page.
        self.generate(prompts, 1)
        one = self.generate(prompts, 1)
        return self.generate(prompts, steps + 1) - one

    def _prompt(self, seed: int, tokens: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(self.vocabulary) for _ in range(tokens)]


@dataclass(frozen=True)
class Work:
    """kind: prefill of one prompt, or decode. After `steps` of decode the context is the first
    again."""

    kind: str
    batch: int = 1
    context: int = 128
    steps: int = 32

    @property
    def name(self) -> str:
        if self.kind == "prefill":
            return f"prefill 1x{self.context}"
        return f"decode {self.batch}, context {self.context}"


def rate(model: Contender, work: Work, seconds: float) -> float:
    """Tokens a second over at least `seconds` of the work, and one stretch of it."""
    tokens = 0
    spent = 0.0
    while not tokens or spent < seconds:
        if work.kind == "prefill":
            spent += model.prefill(work.context)
            tokens += work.context
        else:
            spent += model.decode(work.batch, work.context, work.steps)
            tokens += work.batch * work.steps
    return tokens / spent


class Process:
    """A contender in its process, asked over its standard input. Raises RuntimeError when it cannot
    start."""

    def __init__(self, name: str, folder: Path, weights: str, cores: list[int]) -> None:
        # A thread a core that stays there: unpinned OpenMP threads may share a core for
        # milliseconds.
        python = Path(INTERPRETERS.get(name, sys.executable))
        if not python.exists():
            raise RuntimeError(f"{name}: not built (python -m bench.peers_cpu.build {name})")
        places = ",".join(f"{{{core}}}" for core in cores)
        environment = dict(os.environ)
        if not name.startswith("radix"):
            environment |= {
                "OMP_NUM_THREADS": str(len(cores)),
                "OMP_PROC_BIND": "true",
                "OMP_PLACES": places,
            }
        self._process = subprocess.Popen(
            [python, "-m", "bench.serving.contender", name, folder, weights, str(len(cores))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        try:
            facts = self._answer()
        except RuntimeError as error:
            raise RuntimeError(f"{name} {weights}: {error}") from None
        self.name = name
        self.version = facts["version"]
        self.weight_bytes = facts["weight_bytes"]
        self.expert_bytes = facts["expert_bytes"]
        self.held_bytes = facts["held_bytes"]
        self.rss = facts["rss"]
        self.rss_imported = facts["rss_imported"]

    def rate(self, work: Work, seconds: float) -> float:
        """Tokens a second, see `rate`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([vars(work), seconds]) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["rate"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"ended with {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _resident() -> int:
    match = re.search(r"^VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(match[1]) * 1024 if match else 0


def main() -> None:
    name, folder, weights, threads = sys.argv[1:]
    module = importlib.import_module(MODULES[name])
    imported = _resident()
    model: Contender = module.Model(folder=Path(folder), weights=weights, threads=int(threads))
    facts = {
        "version": model.version,
        "weight_bytes": model.weight_bytes,
        "expert_bytes": model.expert_bytes,
        "held_bytes": model.held_bytes,
        "rss": _resident(),
        "rss_imported": imported,
    }
    print(json.dumps(facts), flush=True)
    try:
        for line in sys.stdin:
            work, seconds = json.loads(line)
            print(json.dumps({"rate": rate(model, Work(**work), seconds)}), flush=True)
    finally:
        model.close()


if __name__ == "__main__":
    main()
