"""Records of latent attention that do not fit together, and lengths that are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import radix_kernels as rk
from radix_kernels import decoder as records
from tests.kernel.latent_records import PAGE, pack_heads, places, split
from tests.marks import needs_cpu_library

pytestmark = needs_cpu_library


def packed(rows: int, columns: int) -> rk.PackedWeight:
    return rk.pack_weight(torch.zeros(rows, columns))


def packed_heads(heads: int, rows: int, columns: int) -> rk.PackedHeads:
    return pack_heads(torch.zeros(heads, rows, columns))


def decode_record(**change: Any) -> Any:
    q, out = split(2 * (32 + 16), 2 * 48)
    given = {"q": q, "out": out, "softmax_scale": 1.0, "cache": torch.zeros(2, PAGE, 32)}
    weights = {"absorb": packed_heads(2, 16, 32), "values": packed_heads(2, 48, 16)}
    return records.LatentAttentionOp(**{**given, **weights, **change})


def prefill_record(**change: Any) -> Any:
    q, out = split(2 * (32 + 16), 2 * 48)
    given = {"q": q, "out": out, "heads": 2, "softmax_scale": 1.0}
    held = {"cache": torch.zeros(2, PAGE, 32), "expand": packed(2 * (32 + 48), 16)}
    return records.LatentPrefillOp(**{**given, **held, **change})


def run_record(record: Any, rng: Any, **change: Any) -> torch.Tensor:
    table = torch.tensor([[1, *[2**30] * 7]]).int()
    where = {**places([2], [3], rng), "page_table": table, **change}
    expanded = where.pop("num_expanded", int(isinstance(record, records.LatentPrefillOp)))
    decoder = rk.Decoder([(192, "float32")], [record])
    return decoder(torch.zeros(2, 192), **where, num_expanded=expanded)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"absorb": packed_heads(5, 16, 32), "values": packed_heads(5, 48, 16)},
            "are not 5 heads",
        ),
        ({"absorb": packed_heads(2, 16, 48)}, "of which 48 become 16"),
        ({"absorb": packed_heads(2, 32, 32)}, "32 become 32, and a cache of 32"),
        ({"values": packed_heads(2, 32, 16)}, "linear_heads: out has shape"),
        ({"values": packed_heads(2, 48, 32)}, "linear_heads: x has shape"),
        ({"values": packed_heads(1, 48, 16)}, "different numbers of heads"),
        ({"cache": torch.zeros(2, PAGE, 64)}, "and a cache of 64 values"),
        ({"cache": torch.zeros(2, 32)}, "kv_cache"),
        ({"cache": torch.zeros(2, PAGE, 32).bfloat16()}, "has dtype bfloat16, expected float32"),
    ],
)
def test_refusals_of_the_absorbed_form(change: dict[str, Any], message: str, rng: Any) -> None:
    run_record(decode_record(), rng)
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        run_record(decode_record(**change), rng)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 0}, "are not 0 heads with a weight"),
        ({"heads": 5}, "are not 5 heads"),
        ({"heads": 3}, "160 of 3 heads of 32 and 32"),
        ({"expand": packed(2 * (32 + 32), 16)}, "16 latent values become 128 of 2 heads"),
        ({"expand": packed(2 * (32 + 48), 32)}, "32 latent values"),
        ({"cache": torch.zeros(2, PAGE, 16)}, "a token of the cache has 16"),
        ({"cache": torch.zeros(2, PAGE, 64)}, "a token of the cache has 64"),
        ({"cache": torch.zeros(2, 32)}, "kv_cache"),
        ({"cache": torch.zeros(2, PAGE, 32).bfloat16()}, "has dtype bfloat16, expected float32"),
    ],
)
def test_refusals_of_a_prefill(change: dict[str, Any], message: str, rng: Any) -> None:
    run_record(prefill_record(), rng)
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        run_record(prefill_record(**change), rng)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_expanded": -1}, "num_expanded is -1, expected 0 to 1"),
        ({"num_expanded": 2}, "num_expanded is 2, expected 0 to 1"),
        ({"kv_lens": torch.tensor([-1]).int()}, r"kv_lens\[0\] is -1, expected 0 to 32"),
        ({"kv_lens": torch.tensor([33]).int()}, r"kv_lens\[0\] is 33, expected 0 to 32"),
        ({"kv_lens": torch.tensor([1]).int()}, r"kv_lens\[0\] is 1, less than the entry's 2"),
        ({"kv_lens": torch.tensor([0]).int()}, r"kv_lens\[0\] is 0, less than the entry's 2"),
        ({"kv_lens": torch.tensor([3, 3]).int()}, "kv_lens has shape"),
        ({"kv_lens": torch.tensor([3])}, "kv_lens has dtype"),
        ({"kv_lens": torch.tensor([9]).int()}, r"page_table\[0, 1\] is 1073741824"),
        ({"cu_seqlens_q": torch.tensor([0, 3]).int()}, "goes from 0 to 3, expected 0 to 2"),
        ({"cu_seqlens_q": torch.tensor([1, 2]).int()}, "goes from 1 to 2"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 2]).int()}, "cu_seqlens_q has shape"),
        ({"cu_seqlens_q": torch.tensor([2, 0]).int()}, "less than the one before"),
    ],
)
def test_refusals_of_lengths(change: dict[str, Any], message: str, rng: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        run_record(prefill_record(), rng, **change)


def test_weights_that_the_library_has_not_packed_are_refused(rng: Any) -> None:
    plain = packed_heads(2, 16, 32)
    object.__setattr__(plain, "native", None)
    for record in (decode_record(absorb=plain), prefill_record(expand=torch.zeros(160, 16))):
        with pytest.raises(NotImplementedError, match="that the CPU library has packed"):
            run_record(record, rng)
