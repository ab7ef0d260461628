"""What is no tensor is refused by name: every tensor argument of every op, in a call that is right
but for that."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

import radix_kernels as rk
from radix_kernels import selftest
from radix_kernels._ops import OPS, OpSpec

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.filterwarnings("ignore:radix_kernels runs its reference"),
]

Call = dict[str, Any]  # arguments by name
# What the native library calls the entry that serves an op, where it has another name.
ENTRIES = {
    "linear_silu_and_mul": "linear",
    "top_k_top_p_sampling_with_logprobs": "top_k_top_p_sampling",
}


def right_calls(op: OpSpec, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """One for each set of tensors that the selftest gives the op."""
    function = getattr(rk, op.name)
    signature = inspect.signature(function)
    calls: dict[tuple[str, ...], Call] = {}

    def noted(*args: Any, **options: Any) -> Any:
        call = dict(signature.bind(*args, **options).arguments)
        calls.setdefault(tuple(tensors(call)), call)
        return function(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(rk, op.name, noted)
        selftest.run("cpu", ops=[op.name], include_reference=True)
    return list(calls.values())


def tensors(call: Call) -> list[str]:
    return [name for name, value in call.items() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_what_is_no_tensor_is_named(op: OpSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = right_calls(op, monkeypatch)
    assert calls, "the selftest has a case of every op"
    function = getattr(rk, op.name)
    parameters = inspect.signature(function).parameters
    names = f"({op.name}|{ENTRIES.get(op.name, op.name)})"
    for call in calls:
        for name in tensors(call):
            may_be_none = "None" in str(parameters[name].annotation)
            for wrong in ([1.0, 2.0], *(() if may_be_none else (None,))):
                kind = type(wrong).__name__
                with pytest.raises(TypeError) as caught:
                    function(**{**call, name: wrong})
                pattern = rf"^{names}: {name} is (a '{kind}'|{kind}), expected a tensor"
                assert re.match(pattern, str(caught.value)), str(caught.value)
