"""What the tests of the grammar processes share."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import numpy as np

from radix_runtime.constraint import Constraint
from radix_runtime.errors import RequestError
from radix_runtime.grammar.backend import Compiled, Vocabulary
from radix_runtime.grammar.frames import Hello
from radix_runtime.grammar.masker import Masker
from radix_runtime.grammar.step_masks import PromisedMasks
from radix_runtime.hub import DEMO_MODEL_DIR
from radix_runtime.step_plan import Forward
from radix_runtime.text.tokenizer import load_tokenizer

PATIENCE = 120  # seconds; the machine may have much else to do
SIZE = 1550  # more than the tokenizer has
EOS = 2
RAN = Forward(queued_at=0.0, is_running=lambda: False)
TOKENIZER = load_tokenizer(DEMO_MODEL_DIR)
VOCABULARY = Vocabulary.of(TOKENIZER, SIZE, [EOS])


def hello(**fields: float) -> Hello:
    return Hello("llguidance", vocabulary=VOCABULARY, threads=2, **fields)  # type: ignore[arg-type]


class MaskRig:
    """A masker with what it tells of failures; masks as sets of ids."""

    def __init__(self, rows: int = 8) -> None:
        self.failures: dict[int, RequestError] = {}
        self.masker = Masker(hello(cache_bytes=1 << 26, mask_rows=rows), self._failed)

    def _failed(self, number: int, error: RequestError) -> None:
        self.failures[number] = error

    def open(self, number: int, regex: str, min_tokens: int = 0) -> None:
        constraint = Constraint("regex", regex)
        built = self.masker.open(number, constraint, stop_ids=[EOS], min_tokens=min_tokens)
        built.result(PATIENCE)

    def ask(self, **tokens: list[int]) -> PromisedMasks:
        """Masks for the answers `a1`, `a2`..., which get these tokens first. None may be late."""
        rows = {int(name[1:]): (row, ids) for row, (name, ids) in enumerate(tokens.items())}
        masks = self.masker.promise(len(rows), 0)
        self.masker.fill(masks, rows)
        return masks

    def allowed(self, **tokens: list[int]) -> list[set[int]]:
        return [ids_of(row) for row in taken(self.ask(**tokens))]

    def kill(self) -> None:
        pid = self.masker.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


def taken(masks: PromisedMasks) -> np.ndarray:
    """The masks of a step whose model has run."""
    words, late = masks.take(RAN)
    assert not late.any()
    return words


def ids_of(mask: np.ndarray) -> set[int]:
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def token(text: str) -> int:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert len(ids) == 1
    return ids[0]


def texts_starting(*texts: str) -> set[int]:
    """The tokens that are a beginning of one of these texts."""
    found = set()
    for index in range(TOKENIZER.vocab_size):
        spelled = TOKENIZER.id_to_text(index)
        if index not in TOKENIZER.special_ids and spelled:
            if any(text.startswith(spelled) for text in texts):
                found.add(index)
    return found


def begins(mask: set[int], text: str) -> bool:
    """Whether a mask allows beginnings of `text` alone. Not all of them: what a grammar forces is
    cut into tokens as the model would."""
    return bool(mask) and mask <= texts_starting(text)


def wait(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.005)


class CountingBackend:
    """Compiles anything to a matcher that is told apart by its text."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def compile(self, constraint: Constraint) -> object:
        self.compiled.append(constraint.text)
        return Compiled(FakeMatcher(constraint.text), [])  # type: ignore[arg-type]


class FakeMatcher:
    error = None

    def __init__(self, text: str) -> None:
        self.text = text

    def copy(self) -> FakeMatcher:
        return FakeMatcher(self.text)

    def accept(self, ids: list[int]) -> None:
        assert not ids
