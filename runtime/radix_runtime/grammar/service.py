"""Grammars: the grammar processes of one owner, made when they are first needed."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple

import msgspec

from ..config import ServerArgs
from ..constraint import Constraint
from ..errors import RequestError, refusal
from ..text.tokenizer import Tokenizer
from .backend import Vocabulary
from .compilers import Compilers
from .frames import Hello
from .masker import Masker, OnFailure

NO_BACKEND = "none"  # --grammar-backend: constraints are refused
_MAX_MASK_THREADS = 8


class Checked(NamedTuple):
    """A constraint that can be kept, and warnings for the client."""

    constraint: Constraint
    warnings: list[str]


class Grammars:
    """What a process needs of grammars: the API compiles, the scheduler computes masks, `Engine`
    does both. Thread-safe.

    `tokenizer` is the model's, None if it has none; `vocab_size` the number of its logits,
    `eos_ids` end an answer, `mask_rows` is the largest number of samples in a step."""

    def __init__(
        self,
        args: ServerArgs,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_ids: Iterable[int],
        mask_rows: int = 0,
    ) -> None:
        self._args = args
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = [token for token in eos_ids if 0 <= token < vocab_size]
        self._mask_rows = mask_rows
        self._lock = threading.Lock()
        self._compilers: Compilers | None = None
        self.masker: Masker | None = None

    def start_compilers(self) -> Compilers:
        """The compilers, which are started if they are not there. Raises RequestError."""
        with self._lock:
            if self._compilers is None:
                slots = 1 if _cores() <= 2 else 2
                hello = self._hello(slots)
                hello.cpu_seconds = self._args.grammar_timeout
                self._compilers = Compilers(hello)
            self._compilers.begin()
            return self._compilers

    def check(self, constraint: Constraint) -> Checked:
        """Compiles a constraint, with this server's whitespace where the request has none of its
        own. Waits. Raises RequestError: it is refused, or answers cannot be constrained here, or
        now."""
        constraint = self._prepared(constraint)
        if constraint.kind == "any":
            return Checked(constraint, [])
        outcome = self.start_compilers().compile(constraint)
        return Checked(constraint, _named(outcome, constraint))

    async def checked(self, constraint: Constraint) -> Checked:
        """`check` for a coroutine."""
        constraint = self._prepared(constraint)
        if constraint.kind == "any":
            return Checked(constraint, [])
        outcome = self.start_compilers().compile(constraint)
        with suppress(RequestError):  # and not cancelled, as others may wait for it too
            await asyncio.shield(asyncio.wrap_future(outcome))
        return Checked(constraint, _named(outcome, constraint))

    def _prepared(self, constraint: Constraint) -> Constraint:
        """With this server's whitespace. Raises RequestError: it constrains no answers."""
        self._require(constraint.param)
        if constraint.whitespace is not None:
            return constraint
        whitespace = self._args.constrained_json_whitespace_pattern
        if self._args.constrained_json_disable_any_whitespace:
            whitespace = ""
        return msgspec.structs.replace(constraint, whitespace=whitespace)

    def start_masker(self, on_failure: OnFailure, wake: Callable[[], None]) -> Masker:
        """The process that computes masks; see Masker. Once. Raises RequestError."""
        with self._lock:
            hello = self._hello(max(1, min(_MAX_MASK_THREADS, _cores() // 2)))
            hello.cache_bytes = self._args.grammar_cache_size
            hello.mask_rows = self._mask_rows
            self.masker = Masker(hello, on_failure=on_failure, wake=wake)
            return self.masker

    def close(self) -> None:
        """Ends the processes."""
        with self._lock:
            for child in (self._compilers, self.masker):
                if child is not None:
                    child.close()

    def _require(self, param: str | None = None) -> Tokenizer:
        """The tokenizer. Raises RequestError, which names the field `param`, where answers cannot
        be constrained."""
        if self._args.grammar_backend == NO_BACKEND:
            text = "this server has no grammars (--grammar-backend none)"
            raise refusal("unsupported_parameter", text, param)
        if self._tokenizer is None or not self._eos_ids:
            missing = "tokenizer" if self._tokenizer is None else "token that ends an answer"
            text = f"answers cannot be constrained: the model has no {missing}"
            raise refusal("unsupported_parameter", text, param)
        return self._tokenizer

    def _hello(self, threads: int) -> Hello:
        vocabulary = Vocabulary.of(self._require(), self._vocab_size, self._eos_ids)
        return Hello(self._args.grammar_backend, vocabulary=vocabulary, threads=threads)


def _named(outcome: Future[list[str]], constraint: Constraint) -> list[str]:
    """The warnings; waits for them. An error that names no place names the field of this
    request."""
    try:
        return outcome.result()
    except RequestError as error:
        raise RequestError(
            status=error.status,
            code=error.code,
            message=error.message,
            param=error.param or constraint.param,
            retry_after=error.retry_after,
        ) from None


def _cores() -> int:
    return len(os.sched_getaffinity(0))
