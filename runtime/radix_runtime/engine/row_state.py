"""RowState: what the device knows of each request-table row between steps."""

import torch

from .. import ops
from ..batch import ForwardBatch
from ..device import Device


class RowState:
    """Tokens to decode next and committed lengths:

        next_token     int32 [max_rows + 2, max_samples]  last accepted token, then drafts
        committed_len  int32 [max_rows + 2]               tokens of the row that are in its pages
                                                          for good; 0 of the dummy row

    Element `max_rows` is the dummy row's, which padding reads; the last is the scratch row's, which
    takes the updates of padding and is not read.

    Written on the engine's stream only, so a step finds what the one before it has left, whether
    or not the host has seen that yet."""

    def __init__(self, max_rows: int, max_samples: int, device: Device) -> None:
        shape = (max_rows + 2, max_samples)
        where = device.torch_device
        self.max_samples = max_samples
        self.next_token = torch.zeros(shape, dtype=torch.int32, device=where)
        self.committed_len = torch.zeros(max_rows + 2, dtype=torch.int32, device=where)

    def accept(
        self, batch: ForwardBatch, ids: torch.Tensor, *, all_drawn: bool = False
    ) -> torch.Tensor | None:
        """Moves the rows of `batch` past what it accepts of `ids`, int32: its samples, with those
        of padding.

        Of an entry the first sample is accepted, and each further one whose draft equals the sample
        before it. The last accepted one is the row's next token; a decode row is longer by the
        accepted ones. An entry whose first sample is -1 has drawn nothing: its row stays as it is;
        with `all_drawn` nobody looks, and a -1 is accepted like other ids. Returns how many are
        accepted of an entry that has drawn, int32 [N]; None where each has one sample. Does not
        synchronise."""
        if not batch.is_ragged:
            ops.accept_tokens(
                ids,
                batch.sample_rows,
                batch.grow_rows,
                self.next_token,
                self.committed_len,
                all_drawn=all_drawn,
            )
            return None
        # Token i of an entry is the draft of what was sampled after token i - 1.
        counts: torch.Tensor | None = ops.accept_tokens(
            ids,
            batch.sample_rows,
            batch.grow_rows,
            self.next_token,
            self.committed_len,
            cu_samples=batch.cu_samples,
            drafts=batch.input_ids.index_select(0, batch.logit_rows),
            all_drawn=all_drawn,
        )
        return counts

    def reset(self, committed_len: int = 0) -> None:
        """Every row has `committed_len` tokens, the dummy row none, and decodes id 0."""
        self.next_token.zero_()
        self.committed_len.fill_(committed_len)
        self.committed_len[-2:].zero_()
