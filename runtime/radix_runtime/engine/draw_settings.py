"""DrawSettings: how each row is drawn, on every rank.

Rank 0 draws, but where each rank lists the candidates of its part of the vocabulary it must know
the settings of the draw too."""

import numpy as np
import torch

from ..device import upload
from ..step_plan import RowSampling

CANDIDATES = 256  # that a rank lists of its part of the vocabulary

# One record a row.
_ROW = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed", np.int64),
    ]
)


class _DrawColumns:
    """The settings of a draw, one value a sample, in device memory at fixed addresses: seed int64,
    temperature, top_p and min_p float32, top_k int32. One upload fills them all."""

    _FLOATS = ("temperature", "top_p", "min_p")

    def __init__(self, max_samples: int, device: torch.device) -> None:
        self._size = max_samples
        self._block = torch.zeros(6 * max_samples, dtype=torch.int32, device=device)
        self._columns = self._split(self._block)

    def _split(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        size = self._size
        columns = {"seed": block[: 2 * size].view(torch.int64)}
        names = (*self._FLOATS, "top_k")
        for name, part in zip(names, block[2 * size :].split(size), strict=True):
            columns[name] = part if name == "top_k" else part.view(torch.float32)
        return columns

    def fill(self, rows: np.ndarray) -> None:
        """From the records (`_ROW`) of the samples."""
        block = torch.zeros(6 * self._size, dtype=torch.int32)
        for name, column in self._split(block).items():
            column.numpy()[: len(rows)] = rows[name]
        self._block.copy_(upload(block.numpy(), self._block.device))

    def first(
        self, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The columns of the first samples, in the order in which the ops take them."""
        columns = self._columns
        return (
            columns["temperature"][:count],
            columns["top_k"][:count],
            columns["top_p"][:count],
            columns["min_p"][:count],
            columns["seed"][:count],
        )


class ListedRows:
    """Which of `max_rows` rows can be drawn from the candidates that each rank lists."""

    def __init__(self, max_rows: int) -> None:
        self._listed = np.ones(max_rows, np.bool_)
        self._last: tuple[bytes, bool] | None = None  # rows, and what `are_listed` says of them

    def admit(self, state: RowSampling) -> None:
        """Replaces what is known of `state.row`."""
        self._listed[state.row] = not needs_all_logits(state) and _is_bounded(state)
        self._last = None

    def are_listed(self, rows: np.ndarray) -> bool:
        """Whether candidates are enough for each sample of these rows, int32 [S]."""
        key = rows.tobytes()
        if self._last is None or self._last[0] != key:
            self._last = (key, bool(self._listed[rows].all()))
        return self._last[1]


class DrawSettings:
    """Those of `max_rows` rows, for steps of at most `max_samples` samples. Used by one thread, on
    the engine's stream. `rows`, int32 [S] on the host, is the request-table row of each sample."""

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device, *, max_samples: int
    ) -> None:
        self._vocab_size = vocab_size
        self._rows = np.zeros(max_rows, _ROW)
        self._columns = _DrawColumns(max_samples, device)
        self._filled: bytes | None = None  # the rows whose settings the columns are
        self.listed = ListedRows(max_rows)

    def admit(self, state: RowSampling) -> None:
        """Replaces the settings of `state.row`."""
        params = state.params
        row = self._rows[state.row]
        row["temperature"] = params.temperature
        row["top_k"] = min(params.top_k, self._vocab_size)
        row["top_p"] = params.top_p
        row["min_p"] = params.min_p
        row["seed"] = state.seed
        self.listed.admit(state)
        self._filled = None

    def fill(self, rows: np.ndarray) -> None:
        """Makes the settings of these rows those that `columns` gives."""
        key = rows.tobytes()
        if self._filled != key:
            self._columns.fill(self._rows[rows])
            self._filled = key

    def columns(
        self, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """temperature float32, top_k int32, top_p and min_p float32, seed int64, each [count], at
        fixed addresses. Of samples beyond those of the last `fill` they are 0."""
        return self._columns.first(count)


def needs_all_logits(state: RowSampling) -> bool:
    """Whether a draw for this row edits the logits first, or tells log-probabilities."""
    params = state.params
    holds_back_end = bool(state.stop_ids) and state.min_end > 0
    return bool(params.has_penalties or params.logit_bias or holds_back_end or state.return_logprob)


def _is_bounded(state: RowSampling) -> bool:
    """Whether the filters of this row keep no id that a rank does not list: a nucleus alone, or
    min_p, may keep any number."""
    params = state.params
    if params.temperature == 0:
        return True
    if params.top_k > 0:
        return params.top_k <= CANDIDATES
    return params.top_p >= 1 and params.min_p <= 0
