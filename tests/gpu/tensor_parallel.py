"""Tensor parallelism of the engine on GPUs: the tokens of one rank under every toggle, draws, a
rank that dies, decode time by each way of exchange.

    python -m tests.gpu.tensor_parallel --ranks 2 4

The models are random ones (a Llama, a Qwen3-MoE, a DeepSeek-V2) and the embedded one, in float32:
greedy tokens are those of one rank; where its two best logits are nearly equal an answer may differ
from there on, which is reported. Drawn tokens are the same from candidates of each rank and from
whole logits, with and without graphs, in float32 and bfloat16.
Ranks beyond the number of GPUs share them; their kernels take turns, so such a run says nothing of
time. Every stage prints its seconds; one that does not end within its limit shows where each rank
stands, and ends the run. `--device cpu` rehearses on the CPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
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
from radix_runtime.distributed import Gpus
from radix_runtime.engine.candidate_draw import CandidateDraw
from radix_runtime.engine.model_runner import ModelRunner
from radix_runtime.errors import EngineDeadError
from tests.gpu import rank_models
from tests.gpu.llama_tokens import NEW_TOKENS, Rows, answers, random_llama, wrong_ones
from tests.runtime.demo_tokens import differences

LIMIT = "RADIX_TEST_STAGE_SECONDS"
# What worker processes find in their environment: GPUs are shared; which ways are not gone.
SHARED = "RADIX_TEST_SHARED_GPUS"
WITHOUT = "RADIX_TEST_WITHOUT"

TOGGLES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "no graphs": {"disable_cuda_graph": True},
    "no overlap, pages of one": {"disable_overlap_schedule": True, "page_size": 1},
    "NCCL": {"disable_custom_all_reduce": True},
}


def prepare_rank() -> None:
    """In each worker's process before it begins: tracebacks when it is late, GPUs that ranks
    share, and the ways that no rank goes."""
    faulthandler.dump_traceback_later(0.9 * float(os.environ[LIMIT]))
    if SHARED in os.environ:
        share_gpus()
    leave_out_ways()


def leave_out_ways() -> None:
    """Makes this process ask, whenever an engine starts, which ways are to be left out."""
    lists_candidates = ModelRunner.lists_candidates
    fuses_norms = Gpus.fuses_norms.fget
    assert fuses_norms is not None

    def may_list(runner: ModelRunner) -> bool:
        return "candidates" not in os.environ.get(WITHOUT, "") and lists_candidates(runner)

    def may_fuse(group: Gpus) -> bool:
        return "norms" not in os.environ.get(WITHOUT, "") and fuses_norms(group)

    ModelRunner.lists_candidates = may_list  # type: ignore[assignment, method-assign]
    Gpus.fuses_norms = property(may_fuse)  # type: ignore[assignment, method-assign]


@contextmanager
def without(*ways: str) -> Iterator[None]:
    """Engines that start within it leave out these: candidates (whole logits are gathered), norms
    (a sum over the ranks and its norm are two launches)."""
    os.environ[WITHOUT] = " ".join(ways)
    yield
    del os.environ[WITHOUT]


class Calls:
    """How often rank 0, in this process, went the new ways while steps were queued or captured."""

    def __init__(self) -> None:
        self.norms = 0
        self.draws = 0
        add_and_norm = Gpus.all_reduce_add_rmsnorm
        draw = CandidateDraw.draw

        def counted_norm(*args: Any, **options: Any) -> torch.Tensor:
            self.norms += 1
            return add_and_norm(*args, **options)

        def counted_draw(*args: Any, **options: Any) -> None:
            self.draws += 1
            draw(*args, **options)

        Gpus.all_reduce_add_rmsnorm = counted_norm  # type: ignore[assignment, method-assign]
        CandidateDraw.draw = counted_draw  # type: ignore[assignment, method-assign]

    def take(self) -> tuple[int, int]:
        """Both, since the last call of this."""
        found = (self.norms, self.draws)
        self.norms = 0
        self.draws = 0
        return found


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
    """The engine's greedy answers, with log-probabilities, against those of one rank; and without,
    which are drawn in another way."""
    prompts = greedy_prompts()
    params = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    plain = engine.generate(input_ids=prompts, sampling_params=params)
    scored = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
    same_ids = [output["output_ids"] for output in plain] == [
        output["output_ids"] for output in scored
    ]
    run.say(f"TP {ranks}: greedy tokens without log-probabilities are the same", same_ids)
    parted = differences(want, answers(engine))
    wrong = wrong_ones(parted)
    same = f"{len(want) - len(parted)} of {len(want)} prompts"
    run.say(f"TP {ranks}: {same} have one rank's {NEW_TOKENS} tokens")
    for text in parted:
        run.say(text, text not in wrong)


def greedy_prompts() -> list[list[int]]:
    """Of which none repeats another's."""
    rng = random.Random(8)
    return [rng.choices(range(3, 1500), k=n) for n in (1, 5, 40, 77, 150)]


def drawn(engine: Engine) -> list[list[int]]:
    """Tokens of 48 requests at once: greedy and drawn rows, filters that are listed and that are
    not, penalties; then of some of them alone."""
    rng = random.Random(4)
    prompts = []
    params = []
    for seed in range(48):
        prompts.append(rng.choices(range(3, 1500), k=rng.choice([1, 5, 40, 130])))
        made = SamplingParams(
            temperature=rng.choice([0, 0.8, 1.5]),
            top_k=rng.choice([-1, -1, 20, 256]),
            max_new_tokens=rng.randint(1, 60),
            ignore_eos=True,
            seed=seed,
        )
        if seed % 12 == 7:  # so that most steps are drawn from candidates once it has ended
            made.top_p = 0.9
            made.max_new_tokens = 3
        if seed % 24 == 5:
            made.frequency_penalty = 0.4
            made.max_new_tokens = 5
        params.append(made)
    together = engine.generate(input_ids=prompts, sampling_params=params)
    alone = [
        engine.generate(input_ids=prompt, sampling_params=each)
        for prompt, each in zip(prompts[:6], params[:6], strict=True)
    ]
    return [output["output_ids"] for output in [*together, *alone]]


def check_draws(run: Run, ranks: int, model: Path | None, dtype: str, calls: Calls) -> None:
    """Drawn tokens with candidates and graphs, and with neither. Sums over the ranks are the same
    either way, so the tokens are, to the last."""
    calls.take()
    with run.engine(model, ranks, dtype=dtype) as e:
        want = drawn(e)
    norms, draws = calls.take()
    if run.device != "cpu":
        run.say(f"TP {ranks}: {norms} sums with norms, {draws} draws from candidates were queued")
        run.say("the new ways were gone", norms > 0 and draws > 0)
    for name, ways, settings in (
        ("no graphs", [], {"disable_cuda_graph": True}),
        ("whole logits", ["candidates"], {}),
        ("whole logits, no graphs", ["candidates"], {"disable_cuda_graph": True}),
    ):
        with without(*ways), run.engine(model, ranks, dtype=dtype, **settings) as e:
            found = drawn(e)
        same = sum(1 for a, b in zip(want, found, strict=True) if a == b)
        text = f"TP {ranks}, {dtype}, {name}: {same} of {len(want)} drawn answers are the same"
        run.say(text, same == len(want))


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


def decode_time(run: Run, ranks: int, count: int = 200, **settings: Any) -> float:
    """Milliseconds a token of one request of the embedded model."""
    params = SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)
    with run.engine(None, ranks, dtype="bfloat16", **settings) as e:
        e.generate(input_ids=[5, 6, 7], sampling_params=params)
        start = time.perf_counter()
        e.generate(input_ids=[5, 6, 8], sampling_params=params)
        return (time.perf_counter() - start) / count * 1e3


MODELS = ("llama", *rank_models.NAMES, "embedded")


def model_folder(name: str, folder: Path) -> Path | None:
    """Where the model of MODELS is; the embedded one is None."""
    if name == "embedded":
        return None
    if name == "llama":
        return random_llama(folder)
    return rank_models.random_model(name, folder / name)


def check_models(
    run: Run, folder: Path, worlds: list[int], *, gpus: int, names: list[str], toggles: list[str]
) -> None:
    """Tokens of these models for every number of ranks and toggle; the death of a rank for the
    embedded one."""
    for name in names:
        model = model_folder(name, folder)
        with run.stage(f"{name}: one rank"), run.engine(model, 1) as e:
            want = answers(e)
        for ranks in worlds:
            if ranks > gpus:
                os.environ[SHARED] = "1"
            for toggle in toggles:
                with (
                    run.stage(f"{name}: {ranks} ranks, {toggle}"),
                    run.engine(model, ranks, **TOGGLES[toggle]) as e,
                ):
                    check_tokens(run, ranks, want, e)
                    if model is None:
                        check_death(run, ranks, e)
            os.environ.pop(SHARED, None)


def check_all_draws(run: Run, folder: Path, worlds: list[int], gpus: int) -> None:
    """Draws of the random Llama and the embedded model, in both types."""
    calls = Calls()
    for name, model in (("random Llama", random_llama(folder)), ("embedded model", None)):
        for ranks in worlds:
            if ranks > gpus:
                os.environ[SHARED] = "1"
            for dtype in ("float32", "bfloat16"):
                with run.stage(f"draws, {name}: {ranks} ranks, {dtype}"):
                    check_draws(run, ranks, model, dtype, calls)
            os.environ.pop(SHARED, None)


def time_decode(run: Run, worlds: list[int]) -> None:
    """Prints the decode time of every number of ranks, by each way of exchange, twice in turn."""
    with run.stage("batch-1 decode, embedded model, bfloat16, one rank"):
        run.say(f"{decode_time(run, 1):.3f} ms a token")
    for ranks in worlds:
        for _ in range(2):
            with run.stage(f"batch-1 decode, {ranks} ranks"):
                run.say(f"TP {ranks}: {decode_time(run, ranks):.3f} ms a token")
                if run.device == "cpu":
                    continue
                for ways in (["norms"], ["candidates"], ["norms", "candidates"]):
                    with without(*ways):
                        took = decode_time(run, ranks)
                    run.say(f"TP {ranks}, without {' and '.join(ways)}: {took:.3f} ms a token")
                took = decode_time(run, ranks, disable_cuda_graph=True)
                run.say(f"TP {ranks}, no graphs: {took:.3f} ms a token")
                took = decode_time(run, ranks, disable_custom_all_reduce=True)
                run.say(f"TP {ranks}, NCCL: {took:.3f} ms a token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", choices=("tokens", "draws", "decode"))
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--toggles", choices=TOGGLES, nargs="+", default=list(TOGGLES))
    parser.add_argument("--limit", type=float, default=90.0, help="seconds of a stage")
    args = parser.parse_args()
    gpus = torch.cuda.device_count() if args.device != "cpu" else max(args.ranks)
    os.environ[LIMIT] = str(args.limit)
    run = Run(args.device, args.limit)
    if max(args.ranks) > gpus:
        share_gpus()
    leave_out_ways()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(
            f"from {__spec__.name} import prepare_rank\nprepare_rank()\n"
        )
        sys.path.insert(0, folder)  # workers get this process's path
        if args.only in (None, "tokens"):
            check_models(
                run,
                Path(folder),
                args.ranks,
                gpus=gpus,
                names=args.models,
                toggles=args.toggles,
            )
        if args.only in (None, "draws"):
            check_all_draws(run, Path(folder), args.ranks, gpus)
        if args.only in (None, "decode"):
            time_decode(run, [n for n in args.ranks if n <= gpus])
    run.say("all is well" if run.good else "FAILED")
    sys.exit(not run.good)


if __name__ == "__main__":
    main()
