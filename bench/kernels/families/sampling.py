"""Sampling from float32 logits of a vocabulary of 151,936."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import radix_kernels as rk

from .. import peers
from ..harness import Case, Contender, randn

VOCAB = 151936
# name -> temperature, top-k, top-p
SETTINGS = {
    "greedy": (0.0, -1, 1.0),
    "temperature": (1.0, -1, 1.0),
    "top-k 50 top-p 0.9": (0.7, 50, 0.9),
    "top-p 0.9": (0.7, -1, 0.9),
}
# Share of the words of a mask that allow something, and what these allow.
MASKS = {"masked, few": (0.01, 0b101), "masked, most": (0.95, -1)}
BATCHES = {"cpu": (1, 32), "cuda": (1, 64, 256)}


def sampling(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Logits are normal with deviation 1, the flattest that a filter meets ("flat"), or 4, as a
    trained model's."""
    for batch in BATCHES[device.type]:
        for name, settings in SETTINGS.items():
            for spread in (1.0,) if name == "greedy" else (1.0, 4.0):
                yield _case(device, batch, name, spread, *settings)
        for mask in MASKS:
            yield _masked_case(device, batch, mask)
        yield _greedy_logprobs_case(device, batch)
        yield _logprobs_case(device, batch)


def _case(
    device: torch.device,
    batch: int,
    name: str,
    spread: float,
    temperature: float,
    top_k: int,
    top_p: float,
) -> Case:
    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((batch,), value, dtype=dtype, device=device)

    t, p, zero = (full(x, torch.float32) for x in (temperature, top_p, 0.0))
    k = full(top_k, torch.int32)
    seed = torch.arange(batch, device=device)
    filtered = top_k > 0 or top_p < 1

    def ours(logits: torch.Tensor) -> torch.Tensor:
        return rk.top_k_top_p_sampling(logits, t, k, p, zero, seed, seed)

    def eager(logits: torch.Tensor) -> torch.Tensor:
        if temperature == 0:
            return logits.argmax(-1)
        probs = (logits / temperature).softmax(-1)
        if filtered:
            probs, order = probs.sort(descending=True)
            if top_k > 0:
                probs[:, top_k:] = 0
                probs = probs / probs.sum(-1, keepdim=True)
            probs[probs.cumsum(-1) - probs > top_p] = 0
            return order.gather(1, torch.multinomial(probs, 1))
        return torch.multinomial(probs, 1)

    contenders: dict[str, Contender] = {"radix": ours, "torch": eager}
    flashinfer = peers.load("flashinfer") if device.type == "cuda" and temperature > 0 else None
    if flashinfer is not None:
        contenders["flashinfer"] = _flashinfer(flashinfer, temperature, k, p, top_k, top_p)
    shape = f"{batch}x{VOCAB} {name}"
    if spread == 1 and temperature > 0:
        shape += " flat"
    return Case(
        op="top_k_top_p_sampling",
        shape=shape,
        dtype=torch.float32,
        bytes=4.0 * batch * VOCAB,
        flops=3.0 * batch * VOCAB,
        make_inputs=lambda: (randn(batch, VOCAB, device=device, dtype=torch.float32) * spread,),
        contenders=contenders,
        limit="read",
    )


def _masked_case(device: torch.device, batch: int, name: str) -> Case:
    """A greedy draw under a grammar's mask, beside the draw without it ("greedy")."""
    share, word = MASKS[name]
    zero, one = (torch.full((batch,), x, device=device) for x in (0.0, 1.0))
    k = torch.zeros(batch, dtype=torch.int32, device=device)
    seed = torch.arange(batch, device=device)
    chosen = torch.rand(batch, -(-VOCAB // 32), device=device) < share
    bitmask = torch.where(chosen, word, 0).to(torch.int32)
    bits = torch.arange(VOCAB, device=device)
    allowed = (bitmask[:, bits // 32] >> (bits % 32).to(torch.int32)) & 1 == 1

    def ours(logits: torch.Tensor) -> torch.Tensor:
        edits = rk.LogitEdits(bitmask=bitmask)
        return rk.top_k_top_p_sampling(logits, zero, k, one, zero, seed, seed, edits=edits)

    def unmasked(logits: torch.Tensor) -> torch.Tensor:
        return rk.top_k_top_p_sampling(logits, zero, k, one, zero, seed, seed)

    def eager(logits: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill(~allowed, -torch.inf).argmax(-1)

    return Case(
        op="top_k_top_p_sampling",
        shape=f"{batch}x{VOCAB} greedy, {name}",
        dtype=torch.float32,
        bytes=4.0 * batch * VOCAB + 4.0 * bitmask.numel(),
        flops=float(batch * VOCAB),
        make_inputs=lambda: (randn(batch, VOCAB, device=device, dtype=torch.float32),),
        contenders={"radix": ours, "greedy": unmasked, "torch": eager},
        limit="read",
    )


def _flashinfer(
    library: Any, temperature: float, k: torch.Tensor, p: torch.Tensor, top_k: int, top_p: float
) -> Contender:
    """The functions that FlashInfer has for these filters. The seed is given, so that calls can be
    captured."""
    seed: dict[str, int] = {"seed": 1, "offset": 0}

    def draw(logits: torch.Tensor) -> torch.Tensor:
        if top_k <= 0 and top_p >= 1:
            return library.sampling.sampling_from_logits(
                logits if temperature == 1 else logits / temperature, **seed
            )
        probs = library.sampling.softmax(logits, temperature)
        if top_k <= 0:
            return library.sampling.top_p_sampling_from_probs(probs, p, **seed)
        return library.sampling.top_k_top_p_sampling_from_probs(
            probs, k, p, filter_apply_order="top_k_first", **seed
        )

    return draw


def _greedy_logprobs_case(device: torch.device, batch: int) -> Case:
    """The draw and the log-probabilities of it and of the five best, beside the draw alone
    ("greedy")."""
    zero, one = (torch.full((batch,), x, device=device) for x in (0.0, 1.0))
    k = torch.zeros(batch, dtype=torch.int32, device=device)
    seed = torch.arange(batch, device=device)

    def ours(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return rk.top_k_top_p_sampling_with_logprobs(logits, zero, k, one, zero, seed, seed, 5)

    def eager(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ids = logits.argmax(-1)
        logprobs = logits.log_softmax(-1)
        return ids, logprobs.gather(1, ids[:, None]), *logprobs.topk(5)

    def greedy(logits: torch.Tensor) -> torch.Tensor:
        return rk.top_k_top_p_sampling(logits, zero, k, one, zero, seed, seed)

    return Case(
        op="top_k_top_p_sampling_with_logprobs",
        shape=f"{batch}x{VOCAB} greedy top 5",
        dtype=torch.float32,
        bytes=4.0 * batch * VOCAB,
        flops=3.0 * batch * VOCAB,
        make_inputs=lambda: (randn(batch, VOCAB, device=device, dtype=torch.float32),),
        contenders={"radix": ours, "torch": eager, "radix greedy": greedy},
        limit="read",
    )


def _logprobs_case(device: torch.device, batch: int) -> Case:
    ids = torch.randint(0, VOCAB, (batch,), device=device, dtype=torch.int32)

    def eager(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logprobs = logits.log_softmax(-1)
        return logprobs.gather(1, ids[:, None].long()), *logprobs.topk(5)

    return Case(
        op="token_logprobs",
        shape=f"{batch}x{VOCAB} top 5",
        dtype=torch.float32,
        bytes=4.0 * batch * VOCAB,
        flops=3.0 * batch * VOCAB,
        make_inputs=lambda: (randn(batch, VOCAB, device=device, dtype=torch.float32),),
        contenders={"radix": lambda logits: rk.token_logprobs(logits, ids, 5), "torch": eager},
        limit="read",
    )
