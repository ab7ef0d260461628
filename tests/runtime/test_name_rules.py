"""Name rules and lazy views against the same operations on whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from radix_runtime.families.names import (
    Deinterleave,
    Drop,
    Rename,
    Rule,
    SplitRows,
    Transpose,
    Unstack,
    apply_rules,
)
from radix_runtime.families.tensor_views import Flattened, Item


class File:
    """A tensor of a checkpoint; counts the elements that are read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.read = 0

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        assert all(isinstance(part, slice) and part.step in (None, 1) for part in parts)
        found = self.tensor[index]
        self.read += found.numel()
        return found


def applied(rules: Sequence[Rule], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    sources = ((name, File(tensor)) for name, tensor in tensors.items())
    return dict(apply_rules(rules, sources, fail=lambda name, error: RuntimeError(name, error)))


def check_view(view: Any, expected: torch.Tensor) -> None:
    """As a whole and in pieces."""
    assert view.get_shape() == list(expected.shape)
    assert torch.equal(view[:], expected)
    rows, columns = expected.shape
    assert torch.equal(view[1 : rows - 1], expected[1 : rows - 1])
    assert torch.equal(view[:, 1:columns], expected[:, 1:columns])
    assert torch.equal(view[1:2, 0 : columns - 1], expected[1:2, 0 : columns - 1])


def test_names() -> None:
    x = torch.zeros(1)
    rules = [Drop(r"^visual\."), Rename(r"^model\.text\.", "model."), Rename(r"\.w1\.", ".gate.")]
    found = applied(rules, {"visual.a": x, "model.text.w1.b": x, "model.c": x})
    assert list(found) == ["model.gate.b", "model.c"]


def test_split_rows() -> None:
    x = torch.randn(7, 5)
    rule = SplitRows(r"\.qk\.", ((".q.", 4), (".k.", 3)))
    found = applied([rule], {"a.qk.weight": x, "other": x})
    assert list(found) == ["a.q.weight", "a.k.weight", "other"]
    check_view(found["a.q.weight"], x[:4])
    check_view(found["a.k.weight"], x[4:])
    bias = applied([rule], {"a.qk.bias": x[:, 0]})
    assert torch.equal(bias["a.k.bias"][:], x[4:, 0])
    with pytest.raises(RuntimeError, match=r"a\.qk\.weight.*has shape \[6, 5\], expected 7 rows"):
        applied([rule], {"a.qk.weight": x[:6]})


def test_stacked_experts() -> None:
    """gpt-oss: [experts, in, 2 out], the columns of gate and up in turn."""
    x = torch.randn(3, 4, 10)
    rules = [
        Unstack(r"\.gate_up$", ".{}.gate_up.weight"),
        Transpose(r"\.gate_up\."),
        Deinterleave(r"\.gate_up\.", even=".gate.", odd=".up."),
    ]
    found = applied(rules, {"experts.gate_up": x})
    assert len(found) == 6
    for expert in range(3):
        check_view(found[f"experts.{expert}.gate.weight"], x[expert].T[::2])
        check_view(found[f"experts.{expert}.up.weight"], x[expert].T[1::2])
    with pytest.raises(RuntimeError, match="expected an even number of rows"):
        applied(rules, {"experts.gate_up": x[..., :9]})


def test_a_transposed_tensor_of_the_right_shape_stays() -> None:
    x = torch.randn(4, 6)
    assert torch.equal(applied([Transpose("w", rows=4)], {"w": x})["w"][:], x)
    check_view(applied([Transpose("w", rows=6)], {"w": x})["w"], x.T)
    square = torch.randn(4, 4)
    check_view(applied([Transpose("w", rows=4)], {"w": square})["w"], square.T)


def test_the_last_two_dimensions_as_one() -> None:
    """The bytes of MXFP4's blocks."""
    x = torch.randn(5, 3, 4)
    check_view(Flattened(File(x)), x.flatten(1))
    whole = torch.randn(2, 5, 3, 4)
    check_view(Item(Flattened(File(whole)), index=1), whole[1].flatten(1))
    source = File(x)
    assert torch.equal(Flattened(source)[1:2, 5:7], x[1:2].flatten(1)[:, 5:7])
    assert source.read == 4


def test_only_what_is_asked_for_is_read() -> None:
    source = File(torch.randn(3, 8, 10))
    rules = [Unstack("^w$", "w{}"), Transpose("w"), SplitRows("w", (("a", 5), ("b", 5)))]
    views = dict(apply_rules(rules, [("w", source)], fail=lambda name, error: error))
    assert source.read == 0
    views["a1"][1:3, 2:4]
    assert source.read == 4
