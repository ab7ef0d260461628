"""What an engine must do to be measured, and the sizes that it is measured with."""

from __future__ import annotations

import importlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Prompt = list[int]

MODULES = {
    "radix": "bench.gpu_runtime.radix_engine",
    "vllm": "bench.gpu_runtime.vllm_engine",
}


@dataclass(frozen=True)
class Arm:
    """One engine with its settings, under a name of its own.

    `settings` are keyword arguments of the engine's constructor, and go over what `EngineSizes`
    says to every arm.
    """

    name: str
    engine: str
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Arm:
        """`radix`, `vllm` or `radix-eager:disable_cuda_graph=true,page_size=32`; values are JSON,
        or text where they are not. Raises ValueError."""
        name, _, pairs = text.partition(":")
        engine = name.partition("-")[0]
        if engine not in MODULES:
            raise ValueError(f"{text}: an arm begins with {' or '.join(MODULES)}")
        settings = {}
        for pair in filter(None, re.split(r",(?=\w+=)", pairs)):
            key, equals, value = pair.partition("=")
            if not equals:
                raise ValueError(f"{text}: {pair} is not FIELD=VALUE")
            settings[key] = _value(value)
        return cls(name=name, engine=engine, settings=settings)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class EngineSizes:
    """Settings that all arms share, unless one has its own. `ranks`: GPUs that share each layer."""

    max_rows: int = 256
    chunk: int = 16384
    context: int = 4352
    memory_share: float = 0.85
    ranks: int = 1


@dataclass(slots=True)
class Launch:
    """A step as the scheduler launched it. Times in seconds; `cpu` is the CPU time that the
    scheduling thread had used when the launch began."""

    start: float
    end: float
    cpu: float
    rows: int
    decode_rows: int
    shortest: int  # tokens of the shortest row, this step's included
    longest: int


class Contender(ABC):
    """An engine in this process with random weights of the shape in `folder`/config.json."""

    version: str  # of the engine, and of torch
    vocabulary = 10_000  # prompt ids are below

    @abstractmethod
    def __init__(self, folder: Path, sizes: EngineSizes, settings: dict[str, Any]) -> None: ...

    @abstractmethod
    def generate(self, prompts: list[Prompt], lengths: Sequence[int], temperature: float) -> int:
        """Completes each prompt by exactly `lengths[i]` tokens, whatever they are, without text or
        streams; how many tokens came out."""

    @contextmanager
    def launches(self) -> Iterator[list[Launch]]:
        """Collects the steps launched in the block; none where the engine does not tell."""
        yield []

    @contextmanager
    def device_gaps(self) -> Iterator[list[float]]:
        """Collects, at the end of the block, the microseconds that the device waited between each
        step and the next; none where the engine does not tell."""
        yield []

    def chosen_experts(self, prompts: list[Prompt], length: int, temperature: float) -> np.ndarray:
        """The experts that each row passes in each decode step as `generate` completes the prompts
        by `length` tokens: int64 [length - 1, layers, rows, top_k]. A layer without experts may be
        left out, or have one number throughout. Slower than `generate`."""
        raise NotImplementedError("this engine does not tell which experts it chose")

    def parts(self) -> dict[str, float]:
        """GiB of what the engine of one rank holds, by name; empty where it does not tell."""
        return {}

    def memory(self) -> dict[str, float]:
        """GiB of the device that are in use now, by name; empty on a CPU."""
        import torch

        if not torch.cuda.is_available():
            return {}
        free, total = torch.cuda.mem_get_info()
        return {
            "total": total / 2**30,
            "free": free / 2**30,
            "reserved_by_torch": torch.cuda.memory_reserved() / 2**30,
            "peak_reserved_by_torch": torch.cuda.max_memory_reserved() / 2**30,
        }


def load(arm: Arm, folder: Path, sizes: EngineSizes) -> Contender:
    """The engine of `arm` with the model in `folder`, loaded in this process."""
    model: Contender = importlib.import_module(MODULES[arm.engine]).Model(
        folder=folder, sizes=sizes, settings=arm.settings
    )
    return model
