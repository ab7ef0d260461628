"""Tensor parallelism of the engine on GPUs: the tokens of one rank, a rank that dies, decode time
beside NCCL.

    python -m tests.gpu.tensor_parallel --ranks 2 4

The models are a random Llama and the embedded one, in float32: greedy tokens are those of one rank;
where its two best logits are nearly equal an answer may differ from there on, which is reported.
Ranks beyond the number of GPUs share them; their kernels take turns, so such a run says nothing of
time. Every stage prints its seconds; one that does not end within its limit shows where each rank
stands, and ends the run. `--device cpu` rehearses on the CPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from radix_runtime import Engine, SamplingParams
from radix_runtime.device import Device
from radix_runtime.errors import EngineDeadError
from tests.gpu.llama_tokens import NEW_TOKENS, Rows, answers, random_llama, wrong_ones
from tests.runtime.demo_tokens import differences

LIMIT = "RADIX_TEST_STAGE_SECONDS"
SHARED = "RADIX_TEST_SHARED_GPUS"  # what worker processes find in their environment


def prepare_rank() -> None:
    """In each worker's process before it begins: tracebacks when it is late, GPUs that ranks
    share."""
    faulthandler.dump_traceback_later(0.9 * float(os.environ[LIMIT]))
    if SHARED in os.environ:
        share_gpus()


def share_gpus() -> None:
    """From now on rank r of this process is on GPU r % (number of GPUs)."""
    resolve = Device.resolve

    def resolve_shared(name: str = "auto", index: int = 0, count: int = 1) -> Device:
        return resolve(name, index % torch.cuda.device_count())

    Device.resolve = resolve_shared  # type: ignore[method-assign]


class Run:
    """The stages of one run: their limit and what became of them."""

    def __init__(self, device: str, limit: float) -> None:
        self.device = device
        self.limit = limit
        self.good = True
        self.start = time.monotonic()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Prints the name; ends the program with tracebacks when the block takes too long."""
        print(f"[{time.monotonic() - self.start:5.1f} s] {name}", flush=True)
        faulthandler.dump_traceback_later(self.limit, exit=True)
        yield
        faulthandler.cancel_dump_traceback_later()

    def say(self, text: str, good: bool = True) -> None:
        """Prints a result; one that is not good makes the run fail."""
        if not good:
            text = f"WRONG: {text}"
            self.good = False
        print(f"[{time.monotonic() - self.start:5.1f} s]   {text}", flush=True)

    def engine(self, model: Path | None, ranks: int, **more: Any) -> Engine:
        """An engine of `ranks` ranks with small limits; `more` overrides its settings."""
        settings: dict[str, Any] = {
            "dtype": "float32",
            "max_total_tokens": 8192,
            "max_running_requests": 16,
            "chunked_prefill_size": 256,
        }
        made = Engine(model, device=self.device, tp_size=ranks, **{**settings, **more})
        self.say(f"engine of {ranks} rank{'' if ranks == 1 else 's'} is up")
        return made


def check_tokens(run: Run, ranks: int, want: Rows, engine: Engine) -> None:
    """The engine's greedy answers against those of one rank."""
    parted = differences(want, answers(engine))
    wrong = wrong_ones(parted)
    same = f"{len(want) - len(parted)} of {len(want)} prompts"
    run.say(f"TP {ranks}: {same} have one rank's {NEW_TOKENS} tokens")
    for text in parted:
        run.say(text, text not in wrong)


def check_death(run: Run, ranks: int, engine: Engine) -> None:
    """A rank that is killed during a stream ends it with EngineDeadError within 5 s."""
    params = SamplingParams(max_new_tokens=1500, ignore_eos=True)
    stream = engine.stream(input_ids=[3, 4, 5], sampling_params=params)
    next(stream)
    os.kill(engine.executor.workers[-1].pid, signal.SIGKILL)  # type: ignore[attr-defined]
    start = time.monotonic()
    try:
        list(stream)
    except EngineDeadError as error:
        took = time.monotonic() - start
        run.say(f"TP {ranks}: rank killed: {error} after {took:.2f} s", took < 5)
    else:
        run.say(f"TP {ranks}: nobody missed the rank that was killed", False)


def decode_time(run: Run, ranks: int, nccl: bool = False, count: int = 200) -> float:
    """Milliseconds a token of one request of the embedded model."""
    params = SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)
    with run.engine(None, ranks, dtype="bfloat16", disable_custom_all_reduce=nccl) as e:
        e.generate(input_ids=[5, 6, 7], sampling_params=params)
        start = time.perf_counter()
        e.generate(input_ids=[5, 6, 8], sampling_params=params)
        return (time.perf_counter() - start) / count * 1e3


def check_models(run: Run, folder: Path, worlds: list[int], gpus: int) -> None:
    """Tokens of both models for every number of ranks; the death of a rank for the embedded one."""
    for name, model in (("random Llama", random_llama(folder)), ("embedded model", None)):
        with run.stage(f"{name}: one rank"), run.engine(model, 1) as e:
            want = answers(e)
        for ranks in worlds:
            if ranks > gpus:
                os.environ[SHARED] = "1"
            with run.stage(f"{name}: {ranks} ranks"), run.engine(model, ranks) as e:
                check_tokens(run, ranks, want, e)
                if model is None:
                    check_death(run, ranks, e)
            os.environ.pop(SHARED, None)


def time_decode(run: Run, worlds: list[int]) -> None:
    """Prints the decode time of every number of ranks, and of NCCL beside ours."""
    with run.stage("batch-1 decode, embedded model, bfloat16, one rank"):
        run.say(f"{decode_time(run, 1):.3f} ms a token")
    for ranks in worlds:
        with run.stage(f"batch-1 decode, {ranks} ranks"):
            run.say(f"TP {ranks}: {decode_time(run, ranks):.3f} ms a token")
            if run.device != "cpu":
                run.say(f"TP {ranks}, NCCL: {decode_time(run, ranks, nccl=True):.3f} ms a token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", choices=("tokens", "decode"))
    parser.add_argument("--limit", type=float, default=40.0, help="seconds of a stage")
    args = parser.parse_args()
    gpus = torch.cuda.device_count() if args.device != "cpu" else max(args.ranks)
    os.environ[LIMIT] = str(args.limit)
    run = Run(args.device, args.limit)
    if max(args.ranks) > gpus:
        share_gpus()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(
            f"from {__spec__.name} import prepare_rank\nprepare_rank()\n"
        )
        sys.path.insert(0, folder)  # workers get this process's path
        if args.only != "decode":
            check_models(run, Path(folder), args.ranks, gpus)
        if args.only != "tokens":
            time_decode(run, [n for n in args.ranks if n <= gpus])
    run.say("all is well" if run.good else "FAILED")
    sys.exit(not run.good)


if __name__ == "__main__":
    main()
