"""`python -m bench.serving perplexity`: the perplexity of a GGUF file on conversations of ShareGPT.

The same tokens, in windows that do not overlap, by the codes of the file in float32, by the codes
with activations in 16 bits, and by what is served: activations in 8 bits. llama.cpp's is beside
them where `python -m bench.peers_cpu.build` has built it."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.real_model import conversations, smollm2
from bench.serving.llama_logits import LlamaLogits

Windows = list[list[int]]

EXACT = "float32"
LLAMA = "llama.cpp"
# The settings of our runs: the codes of the file and x in so many bits.
ROWS: dict[str, dict[str, Any]] = {
    EXACT: {"dtype": "float32"},
    "x-in-16-bits": {"quantizes_x": False},
    "x-in-8-bits": {},
    LLAMA: {},
}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.serving perplexity", description=__doc__)
    parser.add_argument("--model", type=Path, default=smollm2(), help="a GGUF file")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--window", type=int, default=512, help="tokens that see each other")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--only", nargs="+", choices=ROWS, default=list(ROWS), help="rows to measure"
    )
    args = parser.parse_args(argv)
    if args.model is None:
        parser.error("give --model, or `make real-model` for SmolLM2")
    windows = cut(args.model, args.tokens, args.window)
    print(f"{args.model.name}, {sum(map(len, windows))} tokens in windows of {args.window}")
    exact = None
    for row in args.only:
        found = report(row, partial(measure, row, args, windows), exact)
        exact = found if row == EXACT else exact


def measure(row: str, args: argparse.Namespace, windows: Windows) -> float | None:
    """The perplexity; None where llama.cpp is not installed."""
    return llama(args, windows) if row == LLAMA else radix(args, windows, **ROWS[row])


def cut(model: Path, tokens: int, window: int) -> Windows:
    """The turns of conversations one after the other, as tokens in windows of one size."""
    from radix_runtime.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    ids: list[int] = []
    for turns in conversations():
        for turn in turns:
            ids += tokenizer.encode(turn["value"] + "\n", add_special_tokens=False)
        if len(ids) >= tokens:
            break
    count = min(tokens, len(ids)) // window
    return [ids[i * window : (i + 1) * window] for i in range(count)]


def report(
    name: str, measure: Callable[[], float | None], exact: float | None = None
) -> float | None:
    """Measures, prints a line and returns the perplexity."""
    start = time.perf_counter()
    found = measure()
    seconds = time.perf_counter() - start
    if found is None:
        print(f"{name:<28} not installed")
        return None
    against = "" if exact is None else f"  {100 * (found / exact - 1):+.3f} %"
    print(f"{name:<28} {found:9.4f}{against}  ({seconds:.0f} s)", flush=True)
    return found


def radix(
    args: argparse.Namespace, windows: Windows, *, dtype: str = "auto", quantizes_x: bool = True
) -> float:
    """By the engine's log-probabilities of the prompts."""
    from radix_runtime import Engine
    from radix_runtime.quantization.gguf import GgufMethod

    GgufMethod.quantizes_x = quantizes_x
    settings: dict[str, Any] = {"dtype": dtype, "num_threads": args.threads, "device": "cpu"}
    limit = 8 * args.window
    with Engine(
        args.model, max_total_tokens=limit, context_length=2 * args.window, **settings
    ) as e:
        outputs = e.generate(
            input_ids=windows,
            sampling_params={"temperature": 0, "max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
        )
    found = [
        entry[0]
        for output in outputs
        for entry in output["meta_info"]["input_token_logprobs"]
        if entry[0] is not None
    ]
    assert len(found) == sum(len(window) - 1 for window in windows)
    return math.exp(-sum(found) / len(found))


def llama(args: argparse.Namespace, windows: Windows) -> float | None:
    """By llama.cpp's logits; None where it is not installed."""
    try:
        model = LlamaLogits(args.model, window=args.window, threads=args.threads)
    except ImportError:
        return None
    print(f"llama.cpp: {model.system_info()}")
    found = [value for window in windows for value in model.logprobs(window)]
    model.close()
    return math.exp(-sum(found) / len(found))
