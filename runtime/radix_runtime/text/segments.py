"""SegmentedEncoder: a long conversation is tokenized anew only where it is new."""

# The `tokenizers` library takes the added tokens that are not normalized out of a text first, and
# normalizes, cuts and encodes each piece between them on its own. So the ids of a text are those of
# its parts one after the other, if it is cut just before such tokens. It is cut before, not after
# them, because a tokenizer may treat the beginning of a text in its own way ("first" of Metaspace),
# and a part that begins with an added token has nothing at its beginning to treat.

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import chain, pairwise

import numpy as np
import tokenizers

_CAPACITY = 64 << 20  # bytes of ids and texts
_WORTH = 64  # characters of a part that is worth keeping
_OVERHEAD = 200  # bytes of an entry beside them

Encode = Callable[[str], list[int]]


class SegmentedEncoder:
    """Encodes a text in parts, and keeps the ids of those that it has seen lately. The result is
    exactly that of `encode`, which adds no special tokens. Thread-safe.

    `added` are the added tokens of the tokenizer."""

    def __init__(self, encode: Encode, added: Iterable[tokenizers.AddedToken]) -> None:
        self._encode = encode
        self._cuts = _cuts(list(added))
        self._known: OrderedDict[str, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0

    def encode(self, text: str) -> list[int]:
        """Token ids."""
        parts = self._parts(text)
        if len(parts) == 1:
            return self._ids(text)
        return list(chain.from_iterable(self._ids(part) for part in parts))

    def _parts(self, text: str) -> list[str]:
        if self._cuts is None:
            return [text]
        places = [found.start() for found in self._cuts.finditer(text)]
        bounds = [0, *places, len(text)]
        parts = [text[start:end] for start, end in pairwise(bounds)]
        return [part for part in parts if part] or [text]

    def _ids(self, part: str) -> list[int]:
        if len(part) < _WORTH:
            return self._encode(part)
        with self._lock:
            known = self._known.get(part)
            if known is not None:
                self._known.move_to_end(part)
        if known is not None:
            found: list[int] = known.tolist()
            return found
        ids = self._encode(part)
        self._keep(part, np.array(ids, dtype=np.int32))
        return ids

    def _keep(self, part: str, ids: np.ndarray) -> None:
        with self._lock:
            if part in self._known:
                return
            self._known[part] = ids
            self.bytes += _size(part, ids)
            while self.bytes > _CAPACITY:
                self.bytes -= _size(*self._known.popitem(last=False))


def _size(part: str, ids: np.ndarray) -> int:
    return len(part.encode()) + ids.nbytes + _OVERHEAD


def _cuts(added: list[tokenizers.AddedToken]) -> re.Pattern[str] | None:
    """Finds the tokens before which a text may be cut; None if there are none."""
    if any(token.single_word for token in added):
        return None  # whether such a token counts depends on what stands behind the cut
    contents = [token.content for token in added]
    safe = [
        token.content
        for token in added
        if token.special
        and not (token.normalized or token.lstrip)
        and not any(_overlaps(other, token.content) for other in contents)
    ]
    if not safe:
        return None
    longest_first = sorted(safe, key=len, reverse=True)
    return re.compile("|".join(re.escape(content) for content in longest_first))


def _overlaps(other: str, token: str) -> bool:
    """Whether `other` could begin before `token` in a text and reach into it."""
    ends = (other[start:] for start in range(1, len(other)))
    return any(token.startswith(end) or end.startswith(token) for end in ends)
