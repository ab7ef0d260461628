"""Our engine as a contender, and what only it can tell: when each step was launched."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import radix_kernels
import radix_runtime
from radix_runtime.engine.facts import engine_facts
from radix_runtime.offline import Engine
from radix_runtime.step_plan import StepPlan

from .contender import Contender, EngineSizes, Launch, Prompt


class Model(Contender):
    """`radix_runtime.Engine` without a tokenizer."""

    def __init__(self, folder: Path, sizes: EngineSizes, settings: dict[str, Any]) -> None:
        defaults: dict[str, Any] = {
            "load_format": "dummy",
            "max_running_requests": sizes.max_rows,
            "chunked_prefill_size": sizes.chunk,
            "context_length": sizes.context,
            "mem_fraction_static": sizes.memory_share,
            "tp_size": sizes.ranks,
        }
        self.engine = Engine(folder, **{**defaults, **settings})
        kernels = radix_kernels.capabilities()
        self.version = (
            f"{radix_runtime.__version__}, kernels {kernels['version']} ({kernels['isa']}), "
            f"torch {torch.__version__}"
        )
        self.vocabulary = min(self.vocabulary, self.engine.config.vocab_size)

    def parts(self) -> dict[str, float]:
        """Weights, KV cache, and what steps and CUDA graphs keep: `radix doctor` says the first."""
        runner = getattr(self.engine.executor, "runner", None)
        if runner is None:  # in processes of its own
            return {}
        facts = engine_facts(runner)
        names = ("weight_bytes", "kv_cache_bytes", "step_bytes")
        return {name.removesuffix("_bytes"): float(facts[name] or 0) / 2**30 for name in names}

    def generate(self, prompts: list[Prompt], lengths: Sequence[int], temperature: float) -> int:
        params = [
            {"temperature": temperature, "max_new_tokens": length, "ignore_eos": True}
            for length in lengths
        ]
        outputs = self.engine.generate(input_ids=prompts, sampling_params=params)
        return sum(output["meta_info"]["completion_tokens"] for output in outputs)

    def chosen_experts(self, prompts: list[Prompt], length: int, temperature: float) -> np.ndarray:
        runner: Any = getattr(self.engine.executor, "runner", None)
        if runner is None:
            raise NotImplementedError("ranks in processes of their own tell no experts: --tp 1")
        model: nn.Module = runner.model
        gates: list[Any] = [module for module in model.modules() if hasattr(module, "route")]
        seen: list[np.ndarray] = []
        for gate in gates:
            gate.route = _noting(gate, seen)
        try:
            self.generate(prompts, [length] * len(prompts), temperature)
        finally:
            for gate in gates:
                del gate.route
        steps = [
            np.stack(seen[start : start + len(gates)]) for start in range(0, len(seen), len(gates))
        ]
        decode = [step for step in steps if step.shape[1] == len(prompts)]
        if len(decode) < length - 1:
            raise RuntimeError("the engine did not decode all rows together, step by step")
        return np.stack(decode[1 - length :])

    @contextmanager
    def launches(self) -> Iterator[list[Launch]]:
        executor: Any = self.engine.executor
        launch = executor.launch
        seen: list[Launch] = []

        def timed(plan: StepPlan, *args: Any, **options: Any) -> Any:
            cpu = time.thread_time()
            start = time.perf_counter()
            result = launch(plan, *args, **options)
            end = time.perf_counter()
            step = Launch(
                start=start,
                end=end,
                cpu=cpu,
                rows=len(plan.rows),
                decode_rows=plan.num_decode,
                shortest=int(plan.kv_len.min()),
                longest=int(plan.kv_len.max()),
            )
            seen.append(step)
            return result

        executor.launch = timed
        try:
            yield seen
        finally:
            del executor.launch

    @contextmanager
    def device_gaps(self) -> Iterator[list[float]]:
        # Events on the engine's stream, before and after what a step queues there.
        if not torch.cuda.is_available():
            yield []
            return
        runner: Any = self.engine.executor.runner
        run = runner.run
        starts: list[torch.cuda.Event] = []
        ends: list[torch.cuda.Event] = []
        gaps: list[float] = []

        def timed(plan: StepPlan) -> Any:
            starts.append(_recorded_event())
            result = run(plan)
            ends.append(_recorded_event())
            return result

        runner.run = timed
        try:
            yield gaps
        finally:
            del runner.run
        torch.cuda.synchronize()
        gaps += [
            1e3 * end.elapsed_time(start) for end, start in zip(ends, starts[1:], strict=False)
        ]


def _noting(gate: Any, seen: list[np.ndarray]) -> Callable[..., Any]:
    """Its `route`, which adds the ids that it has chosen to `seen`; not those of experts that every
    token passes."""
    route = gate.route

    def noted(x: torch.Tensor) -> Any:
        weights, ids = route(x)
        seen.append(ids[:, : gate.top_k].cpu().numpy().astype(np.int64))
        return weights, ids

    return noted


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
