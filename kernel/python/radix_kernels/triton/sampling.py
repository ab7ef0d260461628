"""Sampling in Triton: edits as torch ops, then one launch."""

from __future__ import annotations

import torch

from .. import reference
from .._checks.sampling import check_draw, check_top_n
from ..logit_edits import LogitEdits
from .sampling_kernel import draw_rows

BLOCK = 1024
NUM_WARPS = 8


def top_k_top_p_sampling(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    stream: int,
    out: torch.Tensor,
    workspace: torch.Tensor | None = None,
    edits: tuple[torch.Tensor | None, ...] | None = None,
    logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """See `radix_kernels.top_k_top_p_sampling`. The workspace is not used."""
    op = "top_k_top_p_sampling"
    settings = (temperature, top_k, top_p, min_p, seed, position)
    given = None if edits is None else LogitEdits.of(edits)
    x, columns, changes = check_draw(op, logits, settings, stream, given)
    edited = x
    if changes is not None:
        edited = reference.edited_logits(x, position, changes, compute_dtype=torch.float32)
    rows, vocab_size = x.shape
    if rows > 0:
        draw_rows[(rows,)](
            edited, edited.stride(0), vocab_size, *columns, stream, out,
            BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
    if logprobs is not None:
        top_n = logprobs[1].shape[1]
        check_top_n(op, top_n, x)
        found = reference.token_logprobs(x, out, top_n)
        for target, result in zip(logprobs, found, strict=True):
            target.copy_(result)
