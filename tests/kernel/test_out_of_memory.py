"""Where the system refuses memory a CPU op raises, whichever thread asked for it, and the next call
works. A step of decode asks for none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.child import IMPORT_PATH
from tests.marks import needs_cpu_library

SOURCE = Path(__file__).with_name("refuse_memory.c")

pytestmark = [
    pytest.mark.cpu_only,
    needs_cpu_library,
]

BEGIN = """
import contextlib, ctypes, os
import torch
import radix_kernels as rk

refuse_memory = ctypes.CDLL(None).refuse_memory
refuse_memory.argtypes = [ctypes.c_size_t] * 2
NEVER = 2**64 - 1

@contextlib.contextmanager
def refusing(plain=NEVER, aligned=NEVER):
    refuse_memory(plain, aligned)
    try:
        yield
    finally:
        refuse_memory(NEVER, NEVER)

def must_raise(op, **sizes):
    try:
        with refusing(**sizes):
            op()
    except RuntimeError as error:
        assert "out of host memory" in str(error), error
    else:
        raise AssertionError("memory was not asked for")
    op()

rk.set_num_threads(2)
"""
PREFILL = """
q, out = torch.randn(64, 4, 64), torch.zeros(64, 4, 64)
k, v = torch.randn(2, 64, 2, 64)
cu = torch.tensor([0, 64], dtype=torch.int32)
must_raise(lambda: rk.flash_attn_varlen(q, k, v, cu, cu, out=out), aligned=1 << 16)
exact = rk.reference.flash_attn_varlen(q.double(), k.double(), v.double(), cu, cu)
assert (out - exact).abs().max() < 1e-5
"""
# One row is cut over the threads, several are dealt to them. Threads keep their memory, and which
# of them take part is open: each case needs more than the one before, whoever runs it.
SAMPLING = """
for rows, vocab, masked in ((1, 40_000, False), (4, 100_000, False), (4, 250_000, True)):
    edits = None
    if masked:
        allowed = torch.full((4, (vocab + 31) // 32), -1, dtype=torch.int32)
        edits = rk.LogitEdits(bitmask=allowed)
    logits = torch.randn(rows, vocab)
    out = torch.zeros(rows, dtype=torch.int32)
    one = torch.ones(rows)
    zero = torch.zeros(rows)
    columns = one, zero.int(), one * 0.9, zero, torch.arange(rows), torch.arange(rows)
    def draw():
        rk.top_k_top_p_sampling(logits, *columns, edits=edits, out=out)
    must_raise(draw, plain=1 << 16)
    assert torch.equal(out, rk.reference.top_k_top_p_sampling(logits, *columns))
"""
ARGMAX = """
x, w = torch.randn(3000, 32), torch.randn(40, 32)
weight = rk.pack_weight(w)
must_raise(lambda: rk.linear_argmax(x, weight), aligned=1 << 16)
assert torch.equal(rk.linear_argmax(x, weight)[1], rk.linear(x, weight).amax(1))
"""
WORKERS = """
def threads():
    return len(os.listdir("/proc/self/task"))
x, out = torch.randn(4096, 2048), torch.zeros(4096, 1024)
expected = rk.reference.silu_and_mul(x)
before = threads()
with refusing(aligned=0):
    rk.silu_and_mul(x, out=out)  # alone
assert threads() == before and torch.allclose(out, expected, atol=1e-6)
out.zero_()
rk.silu_and_mul(x, out=out)
assert threads() == before + 1 and torch.allclose(out, expected, atol=1e-6)
"""
# Python itself may ask now and then.
DECODE = """
from tests.kernel.test_decoder import Model, step

count_memory = ctypes.CDLL(None).count_memory
count_memory.argtypes, count_memory.restype = [ctypes.c_size_t], ctypes.c_size_t

def requests(op):
    count_memory(1024)
    op()
    return count_memory(NEVER)

for kind in ("dense", "int8", "fp8", "w8a8", "int4", "w4a8"):
    model = Model(kind=kind)
    decoder, weight = model.decoder(model.with_caches()), model.layers[0].qkv[0]
    x, out = model.random(3, 96), torch.zeros(3, weight.n, dtype=torch.bfloat16)
    steps = []
    for i in range(8):
        hidden, places = step(model, [1, 1, 1], [10 + i, 1 + i, 20 + i])
        steps.append(lambda hidden=hidden, places=places: decoder(hidden, **places, max_seqlen_q=1))
    assert requests(steps[0]) > 0, "the workspace of the first step was not seen"
    products = [lambda: rk.linear(x, weight, out=out)] * 8
    draws = [lambda: rk.linear_argmax(x, weight)] * 8
    for ops in (steps[1:], products, draws):
        counts = [requests(op) for op in ops]
        assert min(counts[2:]) == 0, (kind, counts)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("preload") / "librefuse_memory.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-fno-builtin", str(SOURCE), "-o", str(path)], check=True
    )
    return path


@pytest.mark.parametrize(
    "body", [PREFILL, SAMPLING, ARGMAX, WORKERS], ids=["prefill", "sampling", "argmax", "workers"]
)
def test_refused_memory(body, library):
    run(body, library)


def test_decode_asks_for_no_memory(library):
    run(DECODE, library)


def run(body: str, library: Path) -> None:
    env = {**os.environ, "PYTHONPATH": IMPORT_PATH, "LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + body], env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
