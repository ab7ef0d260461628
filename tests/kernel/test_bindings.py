"""The border: how tensors come in, and what a wrong one is told."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from radix_kernels import _loader
from tests.kernel.helpers import FLOATS, assert_same_bits
from tests.kernel.raw_dlpack import CUDA, READ_ONLY, OnlyDlpack, Raw, RawVersioned
from tests.marks import needs_cpu_library

bind = _loader.bind
pytestmark = needs_cpu_library

F32 = torch.float32
BF16 = torch.bfloat16


def ones(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def rope_args(**change):
    args = dict(
        positions=torch.zeros(3, dtype=torch.int64), query=ones(3, 32), key=ones(3, 2, 16),
        head_size=16, cos_sin_cache=ones(4, 8), is_neox=True,
    )  # fmt: skip
    return {**args, **change}


def store_args(**change):
    args = dict(
        k=ones(3, 2, 16), v=ones(3, 2, 8), k_cache=ones(4, 2, 2, 16), v_cache=ones(4, 2, 2, 8),
        slot_mapping=torch.arange(3), k_scale=None, v_scale=None,
    )  # fmt: skip
    return {**args, **change}


def rmsnorm_args(**change):
    return {**dict(input=ones(3, 16), weight=ones(16), eps=1e-6, out=ones(3, 16)), **change}


def fused_args(**change):
    return {**dict(input=ones(3, 16), residual=ones(3, 16), weight=ones(16), eps=1e-6), **change}


def gated_args(**change):
    return {**dict(input=ones(3, 16), out=ones(3, 8)), **change}


MAKERS = {
    "rmsnorm": rmsnorm_args,
    "fused_add_rmsnorm": fused_args,
    "apply_rope_inplace": rope_args,
    "store_kv_cache": store_args,
    "silu_and_mul": gated_args,
    "gelu_and_mul": gated_args,
    "gelu_tanh_and_mul": gated_args,
}

columns = ones(3, 32)[:, ::2]  # last dimension not contiguous
WRONG = [
    ("rmsnorm", "input", torch.tensor(1.0), ValueError, "has shape [], expected at least 1"),
    ("rmsnorm", "input", ones(3, 16).long(), TypeError, "has dtype int64, expected bfloat16"),
    ("rmsnorm", "input", columns, ValueError, "has strides [32, 2], expected a contiguous last"),
    ("rmsnorm", "weight", ones(15), ValueError, "has shape [15], expected [16] (last dimension of"),
    ("rmsnorm", "weight", ones(16, dtype=BF16), TypeError, "has dtype bfloat16, expected float32"),
    ("rmsnorm", "out", ones(3, 17), ValueError, "has shape [3, 17], expected [3, 16] (shape of"),
    ("rmsnorm", "out", ones(3, 16, dtype=BF16), TypeError, "has dtype bfloat16, expected floa"),
    ("rmsnorm", "out", columns, ValueError, "has strides [32, 2]"),
    ("rmsnorm", "out", ones(1, 16).expand(3, 16), ValueError, "an expanded tensor cannot be"),
    ("fused_add_rmsnorm", "residual", ones(2, 16), ValueError, "has shape [2, 16], expected [3,"),
    ("fused_add_rmsnorm", "residual", ones(3, 16).half(), TypeError, "has dtype float16"),
    ("fused_add_rmsnorm", "weight", ones(1, 16), ValueError, "has shape [1, 16], expected [16]"),
    ("fused_add_rmsnorm", "input", ones(1, 16).expand(3, 16), ValueError, "an expanded tensor"),
    ("silu_and_mul", "input", ones(3, 15), ValueError, "has shape [3, 15], expected an even"),
    ("silu_and_mul", "out", ones(3, 7), ValueError, "expected input's shape [3, 16] with half"),
    ("gelu_and_mul", "out", ones(2, 8), ValueError, "has shape [2, 8]"),
    ("gelu_tanh_and_mul", "out", ones(3, 8).half(), TypeError, "has dtype float16"),
    ("gelu_and_mul", "input", ones(3, 16).double(), TypeError, "has dtype float64"),
    ("apply_rope_inplace", "positions", ones(3), TypeError, "has dtype float32, expected int32 or"),
    ("apply_rope_inplace", "positions", torch.zeros(3, 1).long(), ValueError, "has shape [3, 1]"),
    ("apply_rope_inplace", "positions", torch.tensor([0, 4, 0]), ValueError, "[1] is 4, expected"),
    ("apply_rope_inplace", "positions", torch.tensor([0, 0, -1]), ValueError, "[2] is -1"),
    ("apply_rope_inplace", "query", ones(4, 32), ValueError, "has shape [4, 32], expected [3,"),
    ("apply_rope_inplace", "query", ones(3, 2, 8), ValueError, "has shape [3, 2, 8]"),
    ("apply_rope_inplace", "query", ones(3, 33), ValueError, "expected a multiple of head_size 16"),
    ("apply_rope_inplace", "key", ones(3, 32).half(), TypeError, "has dtype float16"),
    ("apply_rope_inplace", "key", ones(2, 32), ValueError, "has shape [2, 32]"),
    ("apply_rope_inplace", "cos_sin_cache", ones(4, 8).half(), TypeError, "has dtype float16"),
    ("apply_rope_inplace", "cos_sin_cache", ones(4, 7), ValueError, "expected an even last"),
    ("apply_rope_inplace", "cos_sin_cache", ones(4, 18), ValueError, "at most 16 (head_size)"),
    ("store_kv_cache", "k", ones(3, 32), ValueError, "has shape [3, 32], expected 3 dimensions"),
    ("store_kv_cache", "v", ones(3, 3, 8), ValueError, "has shape [3, 3, 8], expected [3, 2, any]"),
    ("store_kv_cache", "k_cache", ones(4, 2, 2, 8), ValueError, "has shape [4, 2, 2, 8]"),
    ("store_kv_cache", "v_cache", ones(5, 2, 2, 8), ValueError, "pages and page_size of k_cache"),
    ("store_kv_cache", "k_cache", ones(4, 2, 2, 16).half(), TypeError, "has dtype float16"),
    ("store_kv_cache", "slot_mapping", torch.arange(3).int(), TypeError, "has dtype int32"),
    ("store_kv_cache", "slot_mapping", torch.arange(2), ValueError, "has shape [2], expected [3]"),
    ("store_kv_cache", "slot_mapping", torch.tensor([0, 8, 1]), ValueError, "[1] is 8, expected"),
    ("store_kv_cache", "slot_mapping", torch.tensor([0, 1, -2]), ValueError, "[2] is -2"),
]  # fmt: skip


def call(op: str, **change):
    getattr(bind, op)(*MAKERS[op](**change).values())


@pytest.mark.parametrize("op, name, wrong, error, text", WRONG)
def test_wrong_argument_is_named(op, name, wrong, error, text):
    args = MAKERS[op](**{name: wrong})
    before = [a.clone() for a in args.values() if isinstance(a, torch.Tensor)]
    with pytest.raises(error) as caught:
        getattr(bind, op)(*args.values())
    assert str(caught.value).startswith(f"{op}: {name}") and text in str(caught.value)
    after = [a for a in args.values() if isinstance(a, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), "written before"


@pytest.mark.parametrize("op", MAKERS)
def test_every_tensor_argument_is_checked(op):
    """No tensor at all, another device, and no storage: refused by name, for each argument."""
    call(op)
    for name, good in MAKERS[op]().items():
        if not isinstance(good, torch.Tensor):
            continue
        with pytest.raises(TypeError, match=f"^{op}: {name} is a 'int', expected a tensor"):
            call(op, **{name: 3})
        with pytest.raises((ValueError, NotImplementedError), match=f"^{op}: {name} .*cuda:0"):
            call(op, **{name: Raw(good.float(), device=CUDA)})
        with pytest.raises(ValueError, match=f"^{op}: {name} cannot be read: .*meta"):
            call(op, **{name: good.to("meta")})


def test_device_without_kernels():
    x = Raw(ones(3, 16), device=CUDA)
    text = "input is on cuda:0; this is the cpu wheel, which has kernels for cpu only"
    with pytest.raises(NotImplementedError, match=text):
        call("rmsnorm", input=x)


def test_fake_tensor():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(3, 16)
    with pytest.raises(ValueError, match=r"input has shape \[3, 16\] but no storage"):
        call("rmsnorm", input=fake)


def test_views_that_carry_a_bit_are_refused():
    """DLPack loses the conjugate and negative bits; such views are complex or have stride 2."""
    z = torch.randn(3, 16, dtype=torch.complex64).conj()
    assert z.is_conj() and z.imag.is_neg()
    # torch's exchange table passes it on; its __dlpack__ refuses by itself.
    with pytest.raises((TypeError, ValueError), match="input has dtype complex64|conjugate bit"):
        call("rmsnorm", input=z)
    with pytest.raises(ValueError, match="input has strides"):
        call("rmsnorm", input=z.imag)


@pytest.mark.parametrize("version", [None, 1])
@pytest.mark.parametrize("options", [{}, {"strides": False}, {"byte_offset": 64}], ids=str)
def test_hand_made_capsules(version, options):
    make = Raw if version is None else RawVersioned
    x = torch.randn(3, 16)
    expected = torch.empty(3, 16)
    out = ones(3, 16)
    call("rmsnorm", input=x, out=expected)
    call("rmsnorm", input=make(x, version=version, **options), out=out)
    assert_same_bits(out, expected)


def test_capsules_that_are_refused():
    with pytest.raises(ValueError, match="out is read-only, the op writes to it"):
        call("rmsnorm", out=RawVersioned(ones(3, 16), version=1, flags=READ_ONLY))
    call("rmsnorm", input=RawVersioned(ones(3, 16), version=1, flags=READ_ONLY))
    with pytest.raises(ValueError, match="DLPack version is unknown"):
        call("rmsnorm", input=RawVersioned(ones(3, 16), version=2))
    with pytest.raises(TypeError, match="input has vector elements"):
        call("rmsnorm", input=Raw(ones(3, 16), lanes=4))
    with pytest.raises(ValueError, match="input has 9 dimensions, at most 8"):
        call("rmsnorm", input=Raw(ones(1), shape=(1,) * 9))
    with pytest.raises(ValueError, match="input has 9 dimensions, at most 8"):
        call("rmsnorm", input=Raw(ones(1), shape=(1,) * 9, strides=False))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_without_exchange_api(dtype):
    """A torch that has only __dlpack__ gets the same bits, for reads and for writes."""
    for op, maker in MAKERS.items():
        args = maker()
        for name, arg in args.items():
            if isinstance(arg, torch.Tensor) and arg.is_floating_point():
                kept = F32 if name == "cos_sin_cache" else dtype
                args[name] = torch.randn(arg.shape).to(kept)
        plain = [a.clone() if isinstance(a, torch.Tensor) else a for a in args.values()]
        getattr(bind, op)(*plain)
        wrapped = [OnlyDlpack(a) if isinstance(a, torch.Tensor) else a for a in args.values()]
        getattr(bind, op)(*wrapped)
        for got, expected in zip(args.values(), plain, strict=True):
            if isinstance(got, torch.Tensor) and got.is_floating_point():
                assert_same_bits(got, expected)


def test_requires_grad():
    weight = torch.nn.Parameter(torch.randn(16))
    expected = ones(3, 16)
    out = ones(3, 16)
    call("rmsnorm", weight=weight, out=expected)
    call("rmsnorm", weight=OnlyDlpack(weight), out=out)
    assert_same_bits(out, expected)


def test_numpy():
    rng = np.random.default_rng()
    x = rng.standard_normal((6, 16), np.float32)
    w = rng.standard_normal(16, np.float32)
    out = np.full((3, 16), np.nan, np.float32)
    expected = torch.empty(3, 16)
    bind.rmsnorm(x[::-2], w, 1e-6, out)  # rows in falling order
    bind.rmsnorm(torch.from_numpy(x[::-2].copy()), torch.from_numpy(w), 1e-6, expected)
    assert_same_bits(torch.from_numpy(out), expected)
    with pytest.raises(ValueError, match="input has strides"):
        bind.rmsnorm(x[:3, ::-1], w, 1e-6, out)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="rmsnorm: out (is read-only|cannot be read)"):
        bind.rmsnorm(x[:3], w, 1e-6, out)


def test_missing_optional_and_zero_tokens():
    call("apply_rope_inplace", key=None)
    empty = torch.zeros(0, dtype=torch.int64)
    call("apply_rope_inplace", positions=empty, query=ones(0, 32), key=ones(0, 2, 16))
    call("store_kv_cache", k=ones(0, 2, 16), v=ones(0, 2, 8), slot_mapping=empty)
    with pytest.raises(TypeError, match="query is a 'NoneType'"):
        call("apply_rope_inplace", query=None)


def test_more_than_2_to_31_elements():
    """Addresses beyond 2^31 elements; only the pages that are touched exist."""
    far = 2**31 + 8
    x = torch.empty(far + 64, dtype=BF16).as_strided((2, 64), (far, 1))
    x.copy_(torch.randn(2, 64))
    out = torch.empty(2, 64, dtype=BF16)
    expected = torch.empty(2, 64, dtype=BF16)
    bind.rmsnorm(x, ones(64), 1e-6, out)
    bind.rmsnorm(x.clone(), ones(64), 1e-6, expected)
    assert_same_bits(out, expected)
    cache = torch.empty(far + 64, dtype=BF16).as_strided((2, 1, 1, 64), (far, 64, 64, 1))
    bind.store_kv_cache(x[:, None], x[:, None], cache, cache, torch.tensor([0, 1]), None, None)
    assert_same_bits(cache[:, 0, 0], x.clone())


@pytest.fixture
def threads():
    before = bind.get_num_threads()
    yield
    bind.set_num_threads(before, False)


def large_ops() -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(301, 1500, generator=rng).to(BF16)
    out = torch.empty_like(x)
    half = torch.empty(301, 750, dtype=BF16)
    bind.rmsnorm(x, ones(1500), 1e-6, out)
    bind.gelu_and_mul(x, half)
    q = x[:, :1024].clone()
    bind.apply_rope_inplace(torch.arange(301), q, None, 64, torch.randn(301, 64, generator=rng), 1)
    return [out, half, q]


def test_bits_do_not_depend_on_threads(threads):
    bind.set_num_threads(1, False)
    expected = large_ops()
    for n, pin in ((2, False), (2, True), (3, True), (7, False)):
        bind.set_num_threads(n, pin)
        assert bind.get_num_threads() == n
        for got, want in zip(large_ops(), expected, strict=True):
            assert_same_bits(got, want)


@pytest.mark.parametrize("n", [0, -1, 1025])
def test_bad_number_of_threads(n):
    with pytest.raises(ValueError, match=f"set_num_threads: n is {n}, expected 1 to 1024"):
        bind.set_num_threads(n, False)


def test_calls_from_many_threads(threads):
    """Ops that find the pool busy, and a change of its size in between."""
    bind.set_num_threads(3, False)
    expected = large_ops()
    failures = []

    def work() -> None:
        for _ in range(5):
            for got, want in zip(large_ops(), expected, strict=True):
                if not torch.equal(got, want):
                    failures.append("other bits")

    callers = [threading.Thread(target=work) for _ in range(4)]
    for caller in callers:
        caller.start()
    for n in (1, 4, 2):
        bind.set_num_threads(n, False)
    for caller in callers:
        caller.join(60)
    assert not failures and not any(caller.is_alive() for caller in callers)


def test_gil_is_released():
    """Python runs on while a kernel does: this thread gets turns during one long call, which is
    long on a machine of many cores too."""
    before = bind.get_num_threads()
    bind.set_num_threads(1, False)
    x = torch.randn(4000, 8192)
    out = torch.empty(4000, 4096)
    calling = 0  # the number of the call that runs; 0: none does
    turns: collections.Counter[int] = collections.Counter()

    def work() -> None:
        nonlocal calling
        for number in range(1, 200):
            calling = number
            bind.gelu_and_mul(x, out)
            calling = 0
            if turns[number] >= 3:
                return

    worker = threading.Thread(target=work)
    worker.start()
    while worker.is_alive():
        number = calling
        if number:
            turns[number] += 1
        time.sleep(0.001)
    bind.set_num_threads(before, False)
    # A call that holds the lock leaves one at most, between its number and its beginning.
    assert max(turns.values()) >= 3


def test_forked_child_has_its_own_pool():
    code = (
        "import os, sys, torch\n"
        "from radix_kernels import _loader\n"
        "b = _loader.bind; b.set_num_threads(2, False)\n"
        "x = torch.randn(300, 1500); w = torch.ones(1500)\n"
        "def run():\n"
        "    out = torch.empty_like(x); b.rmsnorm(x, w, 1e-6, out); return out\n"
        "want = run(); child = os.fork()\n"
        "if child == 0: os._exit(0 if torch.equal(run(), want) else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    path = str(Path(_loader.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
