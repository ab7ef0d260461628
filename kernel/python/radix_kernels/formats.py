"""Quantized linear layers as checkpoints store them (GPTQ, AWQ; GGUF: gguf_blocks.py), as arguments
of `pack_weight`.

    weight = pack_weight(**unpack_awq(qweight, qzeros, scales, group_size=128), dtype="float16")

Every code, scale and zero point is kept, so that `linear` and `unpack_weight` see the values of the
file. Inputs are torch tensors or any other DLPack type; results are torch tensors on their device,
which may share memory with them.
"""

from __future__ import annotations

from typing import Any, TypedDict

from . import _arrays, _checks
from ._arrays import Array, torch_views
from ._lazy import torch

_GROUPS = (128, 64, 32)  # of `pack_weight`, the cheapest first


class PackArguments(TypedDict):
    """Keyword arguments of `pack_weight`, which says what each of them means.

    kind is `int8` or `int4`; with `w8a8` or `w4a8` in its place x is quantized as well. zeros is
    None where every 4-bit zero point is 8. group divides the format's group, whose scale is
    repeated where the format's is larger.
    """

    w: Array
    scales: Array
    kind: str
    zeros: Array | None
    group: int


def unpack_gptq(
    qweight: Array,
    qzeros: Array,
    scales: Array,
    g_idx: Array | None = None,
    *,
    group_size: int,
    bits: int = 4,
    checkpoint_format: str = "gptq",
) -> PackArguments:
    """A layer of a GPTQ checkpoint (Frantar et al., 2022, arXiv:2210.17323), as AutoGPTQ and
    GPTQModel write it.

    With P = 32 / bits codes to a word, the first in its lowest bits, and G = ceil(K / group_size)
    groups: qweight: int32 [K / P, N], P inputs of one output in a word. qzeros: int32 [G, N / P], P
    outputs of one group in a word. scales: [G, N] bfloat16, float16 or float32. g_idx: int32 or
    int64 [K], each input's group; None: in order. weight[k, n] = (code - zero point) * scale of
    group k // group_size.

    bits, group_size (-1: a row is one group) and checkpoint_format are the checkpoint's
    configuration: `gptq` (v1) stores zero point - 1, `gptq_v2` the zero point. `gptq` cannot store
    a zero point of 0 (none of a symmetric checkpoint is): writers leave 15 there, with or without a
    borrow from the next output, and readers take it as 16 or as 0. It is refused.

    Errors: TypeError (dtype), ValueError (shape, group_size; that 15), NotImplementedError (other
    bits or formats; inputs out of order, `desc_act`; groups that are no multiple of 32; 8 bits with
    a zero point other than 128, which `pack_weight` cannot hold).
    """
    op = "unpack_gptq"
    if bits not in (4, 8):
        raise NotImplementedError(f"{op}: bits is {bits}, supported are 4 and 8")
    if checkpoint_format not in ("gptq", "gptq_v2"):
        raise NotImplementedError(
            f"{op}: checkpoint_format is {checkpoint_format!r}, supported are gptq and gptq_v2"
        )
    _checks.dtype(op, "qweight", qweight, ("int32",))
    words = _arrays.as_torch(qweight)
    _checks.rank(op, "qweight", words, 2)
    per_word = 32 // bits
    k = words.shape[0] * per_word
    n = words.shape[1]
    zero_words, scales = _check_groups(op, qzeros, scales, k, n, group_size, per_word)
    if g_idx is not None:
        _check_order(op, g_idx, k, group_size)
    # A word's bytes are its inputs in ascending order: as `pack_weight` wants them, two 4-bit codes
    # to a byte.
    codes = _bytes(words.T)
    stored = _bytes(zero_words) if bits == 8 else _nibbles(zero_words)
    first_form = checkpoint_format == "gptq"
    if bits == 4 and first_form:
        _check_no_underflow(op, stored)
    zeros = (stored + 1 if first_form else stored).T
    if bits == 4:
        return _small_codes(op, codes, scales, zeros, k, group_size)
    if not bool((zeros == 128).all()):
        raise NotImplementedError(
            f"{op}: zero points of 8 bits are not all 128 (sym=False): "
            "pack_weight has zero points for 4 bits alone"
        )
    group, scales = _regroup(op, scales, k, group_size, whole_rows=True)
    signed = (codes ^ 128).view(torch.int8)
    return PackArguments(w=signed, scales=scales, kind="int8", zeros=None, group=group)


def unpack_awq(qweight: Array, qzeros: Array, scales: Array, *, group_size: int) -> PackArguments:
    """A 4-bit layer of an AWQ checkpoint (Lin et al., 2023, arXiv:2306.00978), as AutoAWQ's version
    `gemm` writes it.

    With G = ceil(K / group_size) groups, or one for group_size -1: qweight: int32 [K, N / 8], 8
    outputs of one input in a word, from its lowest 4 bits on outputs 0, 2, 4, 6, 1, 3, 5, 7.
    qzeros: int32 [G, N / 8], in the same order, the zero points themselves. scales: [G, N]
    bfloat16, float16 or float32. weight[k, n] = (code - zero point) * scale of group k //
    group_size.

    Errors: TypeError (dtype), ValueError (shape, group_size), NotImplementedError (groups that are
    no multiple of 32; an odd K, of which `pack_weight` takes no codes).
    """
    op = "unpack_awq"
    _checks.dtype(op, "qweight", qweight, ("int32",))
    words = _arrays.as_torch(qweight)
    _checks.rank(op, "qweight", words, 2)
    k = words.shape[0]
    n = words.shape[1] * 8
    zero_words, scales = _check_groups(op, qzeros, scales, k, n, group_size, 8)
    if k % 2:
        raise NotImplementedError(f"{op}: qweight has {k} inputs, supported are even numbers")
    codes = _pairs(_awq_order(_nibbles(words)).T)
    zeros = _awq_order(_nibbles(zero_words)).T
    return _small_codes(op, codes, scales, zeros, k, group_size)


def _bytes(words: Any) -> Any:
    """int32 [R, C] as uint8 [R, 4 C], the lowest byte of a word first."""
    # A clone, for a column alone counts as contiguous whatever its stride.
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _nibbles(words: Any) -> Any:
    """int32 [R, C] as uint8 [R, 8 C], 4 bits each, the lowest of a word first."""
    data = _bytes(words)
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(1)


def _pairs(codes: Any) -> Any:
    """uint8 [N, K] of 4-bit codes as uint8 [N, K / 2], the even input in the low half."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).contiguous()


def _awq_order(codes: Any) -> Any:
    """[R, N] from the order 0 2 4 6 1 3 5 7 of each eight to the ascending one."""
    return codes.unflatten(1, (codes.shape[1] // 8, 2, 4)).transpose(2, 3).flatten(1)


def _check_groups(
    op: str, qzeros: Array, scales: Array, k: int, n: int, group_size: int, per_word: int
) -> tuple[Any, Any]:
    """qzeros and scales [N, G] as torch tensors, if they fit a weight of k inputs and n outputs."""
    text = f"group_size is {group_size}, expected -1 or a positive number"
    _checks.require(op, group_size == -1 or group_size > 0, text)
    _checks.dtype(op, "qzeros", qzeros, ("int32",))
    _checks.dtype(op, "scales", scales, _checks.FLOATS)
    _checks.require(
        op, n % per_word == 0, f"qweight has {n} outputs, expected a multiple of {per_word}"
    )
    groups = 1 if group_size == -1 else -(-k // group_size)
    why = f"{k} inputs in groups of {group_size}, {n} outputs"
    zero_words, by_group = torch_views(qzeros, scales)
    _checks.shape(op, "qzeros", zero_words, (groups, n // per_word), why)
    _checks.shape(op, "scales", by_group, (groups, n), why)
    return zero_words, by_group.T


def _check_order(op: str, g_idx: Array, k: int, group_size: int) -> None:
    _checks.dtype(op, "g_idx", g_idx, _checks.INTS)
    found = _arrays.as_torch(g_idx)
    _checks.shape(op, "g_idx", found, (k,), "inputs")
    inputs = torch.arange(k, device=found.device)
    expected = inputs * 0 if group_size == -1 else inputs // group_size
    wrong = (found != expected).nonzero()
    if wrong.numel():
        at = int(wrong[0])
        raise NotImplementedError(
            f"{op}: g_idx has input {at} in group {int(found[at])}, expected {int(expected[at])}: "
            "inputs quantized out of order (desc_act) are not supported"
        )


def _check_no_underflow(op: str, stored: Any) -> None:
    wrong = (stored == 15).nonzero()
    if wrong.numel():
        group, output = wrong[0].tolist()
        raise ValueError(
            f"{op}: qzeros holds 15 for group {group} of output {output}: the format gptq cannot "
            "store a zero point of 0, and what is meant depends on the writer; have it save the "
            "checkpoint as gptq_v2"
        )


def _small_codes(
    op: str, codes: Any, scales: Any, zeros: Any, k: int, group_size: int
) -> PackArguments:
    group, scales = _regroup(op, scales, k, group_size)
    if bool((zeros == 8).all()):
        return PackArguments(w=codes, scales=scales, kind="int4", zeros=None, group=group)
    _, zeros = _regroup(op, zeros, k, group_size)
    return PackArguments(w=codes, scales=scales, kind="int4", zeros=zeros, group=group)


def _regroup(
    op: str, values: Any, k: int, group_size: int, whole_rows: bool = False
) -> tuple[int, Any]:
    """The group of `pack_weight` that divides the format's, and values [N, G] repeated for it."""
    if group_size == -1 and whole_rows:
        return 0, values
    if group_size == -1:
        group = _GROUPS[0]
        return group, values.repeat_interleave(-(-k // group), 1)
    fitting = [size for size in _GROUPS if group_size % size == 0]
    if not fitting:
        raise NotImplementedError(
            f"{op}: group_size is {group_size}, supported are -1 and multiples of 32"
        )
    group = fitting[0]
    repeated = values.repeat_interleave(group_size // group, 1)
    return group, repeated[:, : -(-k // group)].contiguous()
