"""Which token is forced where the reasoning of an answer has used up its budget."""

import codecs
from collections import deque
from collections.abc import Sequence

import numpy as np

from ..constraint import ReasoningBudget
from ..text.reasoning import reasoning_families
from .backend import Vocabulary


class BudgetKeeper:
    """Follows one answer with a budget: the text is read as the API reads it.

    The closing tokens are forced one after the other, as long as the grammar of the answer, if it
    has one, lets them; then that leads on."""

    def __init__(self, budget: ReasoningBudget, vocabulary: Vocabulary) -> None:
        family = reasoning_families[budget.family]
        self._budget = budget
        self._tokens = vocabulary.tokens
        markers = {marker.encode() for marker in family.markers}
        self._hidden = {
            token for token in vocabulary.special_ids if vocabulary.tokens[token] not in markers
        }
        self._parser = family.parser(budget.prompt_end)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._length = 0
        self._closing: deque[int] = deque()  # what is left of it, once it has begun

    @property
    def is_done(self) -> bool:
        """Whether no token will be forced any more."""
        return self._parser.is_done and not self._closing

    def accept(self, ids: Sequence[int]) -> None:
        """The next tokens of the answer; how many come at once changes nothing."""
        for token in ids:
            if self.is_done:
                return
            self._length += 1
            if token not in self._hidden:
                self._parser.push(self._decode(self._tokens[token]))
            if self._closing and self._closing.popleft() != token:
                self._closing.clear()
            is_used_up = self._length >= self._budget.tokens and self._parser.in_reasoning
            if not self._closing and is_used_up:
                self._closing.extend(self._budget.closing)

    def force(self, mask: np.ndarray) -> None:
        """Leaves one token of a mask, uint32 [words], where it must come next."""
        if not self._closing:
            return
        word, bit = divmod(self._closing[0], 32)
        if mask[word] >> bit & 1:
            mask[:] = 0
            mask[word] = np.uint32(1 << bit)
