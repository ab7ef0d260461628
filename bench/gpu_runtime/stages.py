"""The works that are measured. A stage takes a loaded engine and gives figures by name: numbers, or
lists of numbers where the spread matters."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .contender import Contender, Launch, Prompt

Figures = dict[str, Any]

STEP_PROMPT = 600  # tokens of every row before the measured decode steps
_STEPS = 80  # of them
_IDS = 10_000  # prompt ids of the workload's request i: random.Random(i).randrange(this)
_BATCH1_PROMPT = 128
_SHARED = 2048  # tokens of the system prompt that all requests share
_OWN = 64  # tokens of each request's own prompt, and of its answer
_seeds = itertools.count(1 << 32)


@dataclass(frozen=True)
class Stage:
    """A work by its name. After `limit` seconds it is given up; `size` is what `kind` counts: rows,
    prompt tokens, output tokens or requests. `prompt`: tokens of every row before decode steps."""

    name: str
    kind: str
    limit: float
    size: int = 0
    repeats: int = 3
    workload: str = ""
    prompt: int = STEP_PROMPT

    @property
    def step_context(self) -> int:
        """Tokens of a row in the measured decode steps, on average."""
        return self.prompt + _STEPS // 2

    def run(self, model: Contender) -> Figures:
        """Measures. Raises what the engine raises."""
        return _KINDS[self.kind](self, model)


def table_stages(
    workload: Path, batches: Sequence[int], step_prompt: int = STEP_PROMPT
) -> list[Stage]:
    """The rows of the speed table, short ones first; decode steps of `batches` rows, each behind a
    prompt of `step_prompt` tokens."""
    return [
        Stage(name="batch-1 decode", kind="batch1", limit=25, size=256),
        *(
            Stage(name=f"TTFT {n}", kind="ttft", limit=10, size=n, repeats=7)
            for n in (128, 1024, 4000)
        ),
        *(
            Stage(name=f"decode step {n}", kind="step", limit=25, size=n, prompt=step_prompt)
            for n in batches
        ),
        *(Stage(name=f"GPU idle {n}", kind="idle", limit=15, size=n) for n in (1, 64, 256)),
        Stage(name="offline", kind="offline", limit=60, workload=str(workload)),
        Stage(name="shared prompt", kind="shared", limit=30, size=512),
    ]


def _batch1(stage: Stage, model: Contender) -> Figures:
    """Greedy tokens a second of one request, its prompt's time included and left out."""
    whole = []
    decode = []
    for _ in range(stage.repeats + 1):  # the first is a warm-up
        prompt = _prompt(model, _BATCH1_PROMPT)
        seconds = _seconds(model, [prompt], [stage.size])
        first = _seconds(model, [_prompt(model, _BATCH1_PROMPT)], [1])
        whole.append(stage.size / seconds)
        decode.append((stage.size - 1) / (seconds - first))
    return {"tokens_per_second": whole[1:], "decode_tokens_per_second": decode[1:]}


def _ttft(stage: Stage, model: Contender) -> Figures:
    """Milliseconds from the call to the first token on an idle engine, new prompts."""
    times = [
        1e3 * _seconds(model, [_prompt(model, stage.size)], [1]) for _ in range(stage.repeats + 2)
    ]
    return {"ttft_ms": times[2:]}


def _step(stage: Stage, model: Contender) -> Figures:
    """Milliseconds of a decode step of `size` rows, every row within 80 tokens of its prompt.

    `mean_ms` is the same for all engines: the time of 81 greedy tokens a row, with the prompts in
    the prefix cache, without that of one token, by 80. `period_ms`, where the engine tells when it
    launches steps, is the median from launch to launch.
    """
    prompts = [_prompt(model, stage.prompt) for _ in range(stage.size)]
    one = [1] * stage.size
    _seconds(model, prompts, one)  # brings the prompts into the cache
    means = []
    steps: list[list[Launch]] = []
    for _ in range(stage.repeats):
        first = _seconds(model, prompts, one)
        with model.launches() as seen:
            seconds = _seconds(model, prompts, [_STEPS + 1] * stage.size)
        means.append(1e3 * (seconds - first) / _STEPS)
        steps.append(_full(seen, stage))
    figures: Figures = {"mean_ms": means}
    if seen:
        if min(len(full) for full in steps) < 2:
            raise RuntimeError(f"no two steps in a row decoded all of {stage.size} rows")
        figures["period_ms"] = [_median_gap([step.start for step in full]) for full in steps]
        figures["thread_cpu_ms"] = [_median_gap([step.cpu for step in full]) for full in steps]
        figures["launch_ms"] = [
            1e3 * statistics.median(step.end - step.start for step in full) for full in steps
        ]
    return figures


def _full(seen: Sequence[Launch], stage: Stage) -> list[Launch]:
    """The steps that decode all rows and do nothing else, all within 80 tokens of the prompts."""
    return [
        step
        for step in seen
        if step.decode_rows == step.rows == stage.size
        and step.shortest >= stage.prompt
        and step.longest <= stage.prompt + _STEPS
    ]


def _median_gap(times: Sequence[float]) -> float:
    return 1e3 * float(np.median(np.diff(times)))


def _idle(stage: Stage, model: Contender) -> Figures:
    """Microseconds from the end of a decode step to the start of the next on the device."""
    prompts = [_prompt(model, stage.prompt) for _ in range(stage.size)]
    _seconds(model, prompts, [1] * stage.size)
    with model.device_gaps() as gaps:
        _seconds(model, prompts, [_STEPS + 1] * stage.size)
    if not gaps:
        raise NotImplementedError("this engine does not tell when the device works")
    inner = gaps[len(gaps) // 4 :]  # the first steps compute prompts
    return {
        "idle_us_p50": float(np.percentile(inner, 50)),
        "idle_us_p99": float(np.percentile(inner, 99)),
        "steps": len(inner),
    }


def _offline(stage: Stage, model: Contender) -> Figures:
    """Output tokens a second of the workload file, its prompts new in each repetition."""
    requests = json.loads(Path(stage.workload).read_text())["requests"]
    prompts = []
    for number, (length, _) in enumerate(requests):
        rng = random.Random(number)
        prompts.append([rng.randrange(_IDS) for _ in range(length)])
    lengths = [output for _, output in requests]
    rates = []
    seconds = []
    for repeat in range(stage.repeats):
        limit = min(_IDS, model.vocabulary)
        shifted = [[(token + 7 * repeat) % limit for token in prompt] for prompt in prompts]
        seconds.append(_seconds(model, shifted, lengths, temperature=0.6))
        rates.append(sum(lengths) / seconds[-1])
    return {"tokens_per_second": rates, "seconds": seconds}


def _shared(stage: Stage, model: Contender) -> Figures:
    """Output tokens a second of requests with one long system prompt, another each time."""
    rates = []
    for _ in range(stage.repeats):
        system = _prompt(model, _SHARED)
        prompts = [system + _prompt(model, _OWN) for _ in range(stage.size)]
        seconds = _seconds(model, prompts, [_OWN] * stage.size)
        rates.append(stage.size * _OWN / seconds)
    return {"tokens_per_second": rates}


_KINDS: dict[str, Callable[[Stage, Contender], Figures]] = {
    "batch1": _batch1,
    "ttft": _ttft,
    "step": _step,
    "idle": _idle,
    "offline": _offline,
    "shared": _shared,
}


def _prompt(model: Contender, length: int) -> Prompt:
    """A prompt that no stage of this process has had."""
    rng = random.Random(next(_seeds))
    return [rng.randrange(model.vocabulary) for _ in range(length)]


def _seconds(
    model: Contender, prompts: list[Prompt], lengths: Sequence[int], temperature: float = 0.0
) -> float:
    """The time of `generate`. Raises RuntimeError when tokens are missing."""
    start = time.perf_counter()
    count = model.generate(prompts, lengths, temperature)
    seconds = time.perf_counter() - start
    if count != sum(lengths):
        raise RuntimeError(f"{count} tokens came out, {sum(lengths)} were asked for")
    return seconds
