"""What the grammar processes add to the library's own work, and what their memory is."""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np

from radix_runtime.constraint import Constraint
from radix_runtime.grammar.backend import Advance, GrammarBackend, Matcher, Vocabulary
from radix_runtime.grammar.compilers import Compilers
from radix_runtime.grammar.frames import Hello
from radix_runtime.grammar.masker import Masker
from radix_runtime.grammar.registry import grammar_backends
from radix_runtime.step_plan import Forward
from radix_runtime.text.tokenizer import load_tokenizer

_FIELDS = 30
_STEPS = 40  # fewer tokens than any answer has
_KINDS = [
    {"type": "string", "maxLength": 20},
    {"type": "integer"},
    {"enum": ["red", "green", "blue"]},
    {"type": "array", "items": {"type": "number"}, "maxItems": 4},
    {"type": "boolean"},
]


def schema(number: int) -> Constraint:
    """A schema of required properties, another one for each number."""
    names = [f"field_{number}_{i}" for i in range(_FIELDS)]
    properties = {name: _KINDS[i % len(_KINDS)] for i, name in enumerate(names)}
    text = {"type": "object", "properties": properties, "required": names}
    return Constraint("json_schema", json.dumps({**text, "additionalProperties": False}))


class Answers:
    """Answers of one schema, which go on with tokens drawn at random from their masks: the matchers
    here, or `masker`'s in its process."""

    def __init__(self, matchers: list[Matcher], masks: np.ndarray) -> None:
        self._random = np.random.default_rng(0)
        self._matchers = matchers
        self.masks = masks
        self.tokens: list[list[int]] = [[] for _ in matchers]

    def fill_here(self, backend: GrammarBackend) -> float:
        """Seconds of the library for a step."""
        rows = zip(self._matchers, self.tokens, strict=True)
        advances = [Advance(matcher=m, ids=ids, row=row) for row, (m, ids) in enumerate(rows)]
        began = time.perf_counter()
        backend.fill(advances, self.masks)
        return time.perf_counter() - began

    def fill_there(self, masker: Masker) -> float:
        """Seconds until the masks of the process are there. They must be the same."""
        count = len(self.tokens)
        tokens = {row + 1: (row, ids) for row, ids in enumerate(self.tokens)}
        began = time.perf_counter()
        masks = masker.promise(count, 0)
        masker.fill(masks, tokens)
        words, _ = masks.take(Forward(queued_at=began, is_running=lambda: False))
        seconds = time.perf_counter() - began
        if not np.array_equal(words, self.masks):
            raise AssertionError("the process gives other masks")
        return seconds

    def go_on(self) -> None:
        """Each answer gets a token."""
        for row, mask in enumerate(self.masks):
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            self.tokens[row] = [int(self._random.choice(allowed))]


def run(args: argparse.Namespace) -> None:
    """Prints the figures."""
    tokenizer = load_tokenizer(Path(args.tokenizer))
    size = tokenizer.vocab_size
    vocabulary = Vocabulary.of(tokenizer, size, [tokenizer.eos_token_id or 0])
    print(f"{size} tokens; load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")
    masker = Masker(_hello(vocabulary, args), on_failure=_fail)
    compilers = Compilers(_hello(vocabulary, args))
    try:
        _time_masks(vocabulary, masker, args)
        _time_compiling(vocabulary, compilers, args)
        _cache_schemas(masker, args.schemas)
    finally:
        masker.close()
        compilers.close()


def _hello(vocabulary: Vocabulary, args: argparse.Namespace) -> Hello:
    return Hello(
        "llguidance",
        vocabulary=vocabulary,
        threads=args.threads,
        cpu_seconds=2.0,
        cache_bytes=1 << 28,
        mask_rows=args.rows,
    )


def _fail(number: int, error: Exception) -> None:
    raise AssertionError(f"answer {number}: {error}")


def _time_masks(vocabulary: Vocabulary, masker: Masker, args: argparse.Namespace) -> None:
    backend = grammar_backends.get("llguidance")(vocabulary, args.threads)
    base = backend.compile(schema(0)).matcher
    masks = np.zeros((args.rows, vocabulary.mask_words), np.uint32)
    answers = Answers([base.copy() for _ in range(args.rows)], masks)
    for number in range(1, args.rows + 1):
        masker.open(number, schema(0), stop_ids=[], min_tokens=0).result()
    here, there = [], []
    for _ in range(_STEPS):
        here.append(answers.fill_here(backend))
        there.append(answers.fill_there(masker))
        answers.go_on()
    masker.close_answers(range(1, args.rows + 1))
    print(
        f"masks of {args.rows} rows by {args.threads} threads: library {_figures(here)}; ", end=""
    )
    print(f"through the process {_figures(there)}")


def _time_compiling(vocabulary: Vocabulary, compilers: Compilers, args: argparse.Namespace) -> None:
    backend = grammar_backends.get("llguidance")(vocabulary, 0)
    compilers.compile(Constraint("regex", "a")).result()
    here: list[float] = []
    there: list[float] = []
    again: list[float] = []
    for number in range(1, args.compiled + 1):
        began = time.thread_time()
        backend.compile(schema(number))
        here.append(time.thread_time() - began)
        for seconds in (there, again):
            began = time.perf_counter()
            compilers.compile(schema(number)).result()
            seconds.append(time.perf_counter() - began)
    print(
        f"a verdict on a schema of {_FIELDS} fields: library (CPU time) {_figures(here)}; ", end=""
    )
    print(f"through the process {_figures(there)}; known {_figures(again)}")


def _cache_schemas(masker: Masker, count: int) -> None:
    before = _resident_bytes(masker.pid)
    for number in range(1, count + 1):
        masker.open(1000 + number, schema(number), stop_ids=[], min_tokens=0).result()
        masker.close_answers([1000 + number])
    after = _resident_bytes(masker.pid)
    print(f"masker: {before >> 20} MB, with {count} schemas cached {after >> 20} MB")


def _resident_bytes(pid: int | None) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _figures(seconds: list[float]) -> str:
    least, median, late = np.percentile(seconds, [0, 50, 95]) * 1000
    return f"{least:.2f} / {median:.2f} / {late:.2f} ms (least, p50, p95)"
