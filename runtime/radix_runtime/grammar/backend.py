"""What a grammar backend offers to the grammar processes."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from ..constraint import Constraint
from ..text.tokenizer import Tokenizer


class Vocabulary(msgspec.Struct, frozen=True):
    """The tokens of a model. `tokens[id]` are the bytes of a token, b"" where the id has none;
    there is one for each logit. `eos_ids` end an answer; `special_ids` are no text. `definition` is
    the tokenizer.json."""

    definition: str
    tokens: list[bytes]
    eos_ids: list[int]
    special_ids: list[int]

    @property
    def mask_words(self) -> int:
        """32-bit words of a mask."""
        return -(-len(self.tokens) // 32)

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int, eos_ids: Iterable[int]) -> "Vocabulary":
        """That of a model with `size` logits."""
        return cls(
            definition=tokenizer.definition(),
            tokens=[tokenizer.id_to_bytes(token) for token in range(size)],
            eos_ids=sorted(token for token in eos_ids if 0 <= token < size),
            special_ids=sorted(token for token in tokenizer.special_ids if token < size),
        )


class Matcher(Protocol):
    """How far one answer has come in its grammar. An error ends it for good."""

    def copy(self) -> "Matcher":
        """Another answer that stands where this one does."""

    def accept(self, ids: Sequence[int]) -> None:
        """The next tokens of the answer, all of them allowed."""

    @property
    def error(self) -> str | None:
        """Why no mask can be given any more."""


class Compiled(NamedTuple):
    """A compiled grammar: the matcher of an answer without tokens, and warnings for the client."""

    matcher: Matcher
    warnings: list[str]


class GrammarBackend(Protocol):
    """Compiles grammars for one vocabulary and computes masks. Registered as a class that takes the
    Vocabulary and the number of threads that may compute masks."""

    def __init__(self, vocabulary: Vocabulary, threads: int) -> None: ...

    def compile(self, constraint: Constraint) -> Compiled:
        """Raises RequestError 400 for a grammar that is malformed, or cannot be kept. Any thread
        may call it."""

    def fill(self, answers: Sequence["Advance"], rows: np.ndarray) -> None:
        """Gives each matcher its new tokens and writes its mask to its row of `rows`, uint32
        [n, mask_words]: bit `id % 32` of word `id // 32` allows an id. The row of a matcher with an
        error has any content."""


class Advance(NamedTuple):
    """A matcher, the tokens that its answer has got, and where its next mask goes."""

    matcher: Any
    ids: list[int]
    row: int
