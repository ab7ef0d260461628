"""`python -m radix_kernels.selftest`: passes here, and reports what is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import radix_kernels as rk
from radix_kernels import _dispatch, _loader, selftest
from radix_kernels._ops import OPS
from radix_kernels.selftest import __main__ as command
from radix_kernels.selftest import trial
from tests.child import IMPORT_PATH

ON_CPU = pytest.mark.cpu_only
NATIVE = _loader.backend or ""


@pytest.fixture(scope="module")
def everything() -> selftest.Report:
    """Of the CPU, those ops included that have no kernel here: a case that is wrong shows."""
    return selftest.run("cpu", include_reference=True)


def named(report: selftest.Report, op: str) -> list[selftest.Row]:
    return [row for row in report.rows if row.op == op]


@ON_CPU
def test_every_op_has_a_case(everything):
    assert set(trial.CASES) == {op.name for op in OPS}
    assert {row.op for row in everything.rows} == set(trial.CASES)


@ON_CPU
def test_all_is_right(everything):
    wrong = [(row.op, row.dtype, row.note) for row in everything.rows if row.ok is not True]
    assert wrong == [] and everything.ok
    assert all(row.cases for row in everything.rows)
    exact = {row.op for row in everything.rows if row.bound == 0}
    assert {"store_kv_cache", "embedding", "moe_align_block_size"} <= exact


def test_native_kernels_are_right():
    """On any device, the executor included: what the library has kernels for."""
    ops = [
        name
        for name, dtypes in rk.capabilities()["ops"].items()
        if any(entry["impl"].startswith(NATIVE) for entry in dtypes.values())
    ]
    assert len(ops) >= 20
    report = selftest.run("cpu", ops=ops, seed=1)
    ran = [row for row in report.rows if row.ok is not None]
    assert [(row.op, row.dtype, row.note) for row in ran if not row.ok] == [], report.facts
    assert {row.op for row in ran} >= set(ops) - {"fused_experts_packed"}


@ON_CPU
def test_seeds(everything):
    again = selftest.run("cpu", ops=["rmsnorm"])
    other = selftest.run("cpu", ops=["rmsnorm"], seed=7)
    assert [row.worst for row in again.rows] == [row.worst for row in named(everything, "rmsnorm")]
    assert [row.worst for row in again.rows] != [row.worst for row in other.rows]


def broken(monkeypatch: pytest.MonkeyPatch, name: str, change) -> None:
    """The kernel runs, and then `change(its arguments)`."""
    kernel = getattr(_loader.bind, name)

    def call(*given):
        kernel(*given)
        change(*given)

    monkeypatch.setattr(_loader.bind, name, call)
    _dispatch.choose_anew()


@pytest.fixture
def anew():
    yield
    _dispatch.choose_anew()


def one_element(x, weight, eps, out):
    out[0, 5] *= 1.1


def nan(x, weight, eps, out):
    out[-1, -1] = float("nan")


def unwritten(x, weight, eps, out):
    torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel() - 1).view(
        torch.uint8
    ).fill_(0xFF)


def outside(x, weight, eps, out):
    torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).zero_()


def raises(x, weight, eps, out):
    raise RuntimeError("the kernel is broken")


@ON_CPU
@pytest.mark.parametrize(
    ("change", "note"),
    [
        (one_element, "error "),
        (nan, "NaN at other places"),
        (unwritten, "NaN at other places"),
        (outside, "memory outside of the output was written"),
        (raises, "RuntimeError: the kernel is broken"),
    ],
)
def test_a_broken_kernel_is_reported(change, note, monkeypatch, anew, capsys):
    broken(monkeypatch, "rmsnorm", change)
    report = selftest.run("cpu", ops=["rmsnorm", "silu_and_mul"])
    assert not report.ok
    assert all(row.ok for row in named(report, "silu_and_mul"))
    for row in named(report, "rmsnorm"):
        assert row.ok is False and note in row.note, row
    assert command.main(["--op", "rmsnorm"]) == 1
    assert capsys.readouterr().out.count("WRONG") == 3


@ON_CPU
def test_wrong_ids_and_codes_are_reported(monkeypatch, anew):
    broken(monkeypatch, "top_k_top_p_sampling", lambda *given: given[8][:4].add_(1))
    broken(monkeypatch, "topk_softmax", lambda *given: given[-1][0].copy_(given[-1][0].flip(0)))
    broken(monkeypatch, "store_kv_cache", lambda *given: given[2][0].zero_())
    ops = ["top_k_top_p_sampling", "topk_softmax", "store_kv_cache"]
    for row in selftest.run("cpu", ops=ops).rows:
        assert row.ok is False and row.note.startswith("error "), row


@ON_CPU
def test_ops_without_a_kernel_are_named_and_do_not_fail():
    report = selftest.run("cpu", ops=["fp8_scaled_mm", "rmsnorm"])
    (row,) = named(report, "fp8_scaled_mm")
    assert row.ok is None and row.cases == 0 and row.note.startswith("no kernel: ")
    assert report.ok


@ON_CPU
def test_json_in_a_process(tmp_path):
    command = [sys.executable, "-m", "radix_kernels.selftest", "--json", "--op", "rmsnorm"]
    env = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["ok"] and said["backend"] == _loader.backend and said["problem"] == ""
    assert {"version", "isa", "torch", "python", "platform", "device", "seed"} <= set(said)
    assert [row["dtype"] for row in said["rows"]] == ["bfloat16", "float16", "float32"]


@ON_CPU
def test_without_torch(tmp_path):
    """The package imports; the self-test says what it needs."""
    path = os.pathsep.join([str(tmp_path), IMPORT_PATH])
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('gone', name='torch')\n")
    command = [sys.executable, "-m", "radix_kernels.selftest"]
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip().endswith(
        "needs torch, which the references are written in: pip install torch"
    )


@ON_CPU
def test_without_a_library_it_fails(monkeypatch, capsys):
    monkeypatch.setattr(_loader, "bind", None)
    monkeypatch.setattr(_loader, "backend", None)
    monkeypatch.setattr(_loader, "reason", "no native library for this test")
    assert command.main([]) == 1
    assert "problem: no native library for this test" in capsys.readouterr().out


@ON_CPU
def test_an_unknown_op():
    with pytest.raises(ValueError, match="there is no op nothing"):
        selftest.run("cpu", ops=["nothing"])
