"""Log-probabilities of one choice, collected until the next delta takes them."""

import numpy as np

from ..messages import Logprobs


class LogprobBuffer:
    """Log-probabilities that were not sent yet, with `top_n` alternatives for each token, and
    `has_ranks` or not."""

    def __init__(self, top_n: int, *, has_ranks: bool = False) -> None:
        self.top_n = top_n
        self.has_ranks = has_ranks
        self._ids: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        self._top_ids: list[np.ndarray] = []
        self._top_values: list[np.ndarray] = []
        self._ranks: list[np.ndarray] = []

    def add(
        self,
        ids: np.ndarray,
        values: np.ndarray,
        top_ids: np.ndarray | None = None,
        top_values: np.ndarray | None = None,
        ranks: np.ndarray | None = None,
    ) -> None:
        """`ids`, `values` and `ranks` are [n], the alternatives [n, at least top_n]. Without
        alternatives the token gets id -1 and NaN in their place, without ranks a 0."""
        missing = (len(ids), self.top_n)
        if top_ids is None:
            top_ids = np.full(missing, -1)
        if top_values is None:
            top_values = np.full(missing, np.nan)
        self._ids.append(ids)
        self._values.append(values)
        self._top_ids.append(top_ids[:, : self.top_n].ravel())
        self._top_values.append(top_values[:, : self.top_n].ravel())
        if self.has_ranks:
            self._ranks.append(np.zeros(len(ids)) if ranks is None else ranks)

    def take(self) -> Logprobs | None:
        """Everything added since the last call, in order; None if there is nothing."""
        if not self._ids:
            return None
        taken = Logprobs(
            ids=_packed(self._ids, "<i4"),
            logprobs=_packed(self._values, "<f4"),
            top_n=self.top_n,
            top_ids=_packed(self._top_ids, "<i4"),
            top_logprobs=_packed(self._top_values, "<f4"),
            ranks=_packed(self._ranks, "<i4") if self.has_ranks else b"",
        )
        for part in (self._ids, self._values, self._top_ids, self._top_values, self._ranks):
            part.clear()
        return taken


def _packed(parts: list[np.ndarray], dtype: str) -> bytes:
    return np.concatenate(parts).astype(dtype).tobytes()
