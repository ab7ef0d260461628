"""Sampling in Triton: edits as torch ops, then one launch."""

from __future__ import annotations

import torch

from .. import reference
from ..sampling import LogitEdits, check_draw, check_top_n
from .sampling_kernel import draw_rows

BLOCK, NUM_WARPS = 1024, 8

Optional = torch.Tensor | None


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
    workspace: Optional = None,
    edits: tuple[Optional, ...] | None = None,
    logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """See `radix_kernels.top_k_top_p_sampling`. The workspace is not used."""
    op = "top_k_top_p_sampling"
    settings = (temperature, top_k, top_p, min_p, seed, position)
    x, columns, changes = check_draw(
        op, logits, settings, stream, None if edits is None else LogitEdits.of(edits)
    )
    edited = x
    if changes is not None:
        edited = reference.edited_logits(x, position, changes, compute_dtype=torch.float32)
    if x.shape[0]:
        draw_rows[(x.shape[0],)](
            edited,
            edited.stride(0),
            x.shape[1],
            *columns,
            stream,
            out,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    if logprobs is not None:
        check_top_n(op, logprobs[1].shape[1], x)
        for target, found in zip(
            logprobs, reference.token_logprobs(x, out, logprobs[1].shape[1]), strict=True
        ):
            target.copy_(found)
