"""Every schema and instance of MaskBench through a grammar backend, as an answer would go."""

# https://github.com/guidance-ai/jsonschemabench (MIT), folder maskbench/data: a file has a schema
# and instances of which each says whether it is valid.

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pool
from pathlib import Path

import numpy as np

from radix_runtime.constraint import Constraint
from radix_runtime.errors import RequestError
from radix_runtime.grammar.backend import Advance, GrammarBackend, Matcher, Vocabulary
from radix_runtime.grammar.registry import grammar_backends
from radix_runtime.text.tokenizer import Tokenizer, load_tokenizer

_PERCENTILES = (50, 95, 99, 99.9, 100)


@dataclass
class Outcome:
    """What became of one file. Compiling is CPU time of its thread, masks are wall-clock time."""

    file: str
    refusal: str = ""
    accepted_invalid: int = 0
    rejected_valid: int = 0
    compile_seconds: float = 0.0
    mask_seconds: list[float] = field(default_factory=list)


class Bench:
    """A backend with one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, backend: str) -> None:
        size = tokenizer.vocab_size
        vocabulary = Vocabulary.of(tokenizer, size, [tokenizer.eos_token_id or 0])
        self._end = vocabulary.eos_ids[0]
        self._tokenizer = tokenizer
        self._backend: GrammarBackend = grammar_backends.get(backend)(vocabulary, 1)
        self._rows = np.zeros((1, vocabulary.mask_words), np.uint32)

    def run(self, file: Path) -> Outcome:
        """Compiles the schema of a file and follows each of its instances."""
        case = json.loads(file.read_text())
        outcome = Outcome(file.stem)
        constraint = Constraint(kind="json_schema", text=json.dumps(case["schema"]))
        began = time.thread_time()
        try:
            matcher = self._backend.compile(constraint).matcher
        except RequestError as error:
            outcome.refusal = error.message
            return outcome
        finally:
            outcome.compile_seconds = time.thread_time() - began
        for test in case["tests"]:
            text = json.dumps(test["data"], ensure_ascii=False)
            accepts = self._accepts(matcher.copy(), text, outcome.mask_seconds)
            outcome.accepted_invalid += accepts and not test["valid"]
            outcome.rejected_valid += test["valid"] and not accepts
        return outcome

    def _accepts(self, matcher: Matcher, text: str, seconds: list[float]) -> bool:
        """Whether an answer could be `text`: each mask allows its next token, the last one the
        end."""
        new: list[int] = []
        for token in [*self._tokenizer.encode(text, add_special_tokens=False), self._end]:
            began = time.perf_counter()
            self._backend.fill([Advance(matcher=matcher, ids=new, row=0)], self._rows)
            seconds.append(time.perf_counter() - began)
            if matcher.error is not None or not self._rows[0, token // 32] >> (token % 32) & 1:
                return False
            new = [token]
        return True


_bench: Bench | None = None


def _start(tokenizer: str, backend: str) -> None:
    global _bench  # one to a process of the pool
    _bench = Bench(load_tokenizer(tokenizer), backend)


def _run(file: Path) -> Outcome:
    assert _bench is not None
    return _bench.run(file)


def run(options: argparse.Namespace) -> None:
    """Prints the table; exits with 1 if an invalid instance was accepted."""
    files = sorted(options.data.glob("*.json"))[:: options.every]
    if not files:
        sys.exit(f"{options.data} has no JSON files")
    with Pool(
        options.jobs, initializer=_start, initargs=(options.tokenizer, options.backend)
    ) as pool:
        outcomes = list(pool.imap_unordered(_run, files, chunksize=16))
    for line in report(outcomes):
        print(line)
    if options.refused:
        for reason, count in _reasons(outcomes).most_common():
            print(f"{count:6} {reason}")
    wrong = [outcome.file for outcome in outcomes if outcome.accepted_invalid]
    if wrong:
        sys.exit(f"invalid instances accepted: {', '.join(sorted(wrong)[:20])}")


def report(outcomes: Sequence[Outcome]) -> Iterable[str]:
    """The lines of the table."""
    served = [outcome for outcome in outcomes if not outcome.refusal]
    invalid = sum(outcome.accepted_invalid for outcome in served)
    strict = [outcome for outcome in served if outcome.rejected_valid]
    right = sum(1 for o in served if not o.accepted_invalid and not o.rejected_valid)
    yield f"schemas            {len(outcomes)}"
    yield f"served             {len(served)} ({100 * len(served) / len(outcomes):.1f} %)"
    yield f"every instance right {right}"
    yield f"reject a valid one {len(strict)}"
    yield f"accepted invalid instances {invalid}"
    yield _times("compile, ms", 1e3, [outcome.compile_seconds for outcome in outcomes])
    masks = [seconds for outcome in served for seconds in outcome.mask_seconds]
    yield _times("mask and commit, us", 1e6, masks)


def _times(name: str, unit: float, seconds: Sequence[float]) -> str:
    values = unit * np.array(seconds)
    shown = [f"p{p:g} {np.percentile(values, p):.1f}" for p in _PERCENTILES]
    return f"{name}: mean {values.mean():.1f}, {', '.join(shown)}"


def _reasons(outcomes: Iterable[Outcome]) -> Counter[str]:
    found: Counter[str] = Counter()
    for outcome in outcomes:
        if outcome.refusal:
            found[re.sub(r"\d+", "N", outcome.refusal)[:100]] += 1
    return found
