"""The table of ops against what it is about: the binding and its stub, the references, the files;
and a new op in it against what is derived from it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import radix_kernels as rk
from radix_kernels import _exports, _loader
from radix_kernels._ops import KERNELS, OPS, PACKING
from tests.child import IMPORT_PATH

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kernel" / "python" / "radix_kernels"

by_name = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)

# What the binding has besides kernels.
NO_KERNELS = {
    "Decoder", "PackedDesc", "PersistentDecoder", "flash_attn_workspace_size",
    "fused_experts_workspace_size",
    "get_num_threads", "hip_runtime", "isa", "m_grouped_gemm_workspace_size",
    "mla_decode_workspace_size", "sampling_workspace_size", "set_bundled_hip", "set_num_threads",
}  # fmt: skip


def stub_functions() -> dict[str, ast.FunctionDef | ast.ClassDef]:
    tree = ast.parse((PACKAGE / "_bind.pyi").read_text())
    return {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}


def test_each_thing_is_said_once():
    names = [op.name for op in OPS]
    assert len(set(names)) == len(names)
    for op in OPS:
        for kernel in op.kernels:
            assert KERNELS[kernel.name] == kernel, "two entries of one name differ"
            backends = [library.backend for library in kernel.libraries]
            assert len(set(backends)) == len(backends), kernel.name


@pytest.mark.skipif(_loader.bind is None, reason="no native library")
@pytest.mark.parametrize("name", KERNELS)
def test_the_library_has_the_kernels_that_the_table_gives_it(name):
    expected = KERNELS[name].library(_loader.backend) is not None
    assert hasattr(_loader.bind, name) == expected


def test_the_stub_of_the_binding_has_every_kernel_and_nothing_else():
    native = {name for name, kernel in KERNELS.items() if kernel.libraries}
    assert set(stub_functions()) - NO_KERNELS == native
    assert set(stub_functions()) >= NO_KERNELS


@pytest.mark.skipif(_loader.bind is None, reason="no native library")
def test_the_stub_takes_as_many_arguments_as_the_binding():
    compared = 0
    for name, node in stub_functions().items():
        found = getattr(_loader.bind, name, None)
        if found is None or isinstance(node, ast.ClassDef):
            continue
        # pybind11 writes `name(arg0: type, arg1: type) -> result`, or the arguments' names.
        signature = found.__doc__.partition("(")[2].partition(") ->")[0]
        count = len(re.findall(r"(?:^|, )\w+:", signature))
        assert count == len(node.args.args), f"{name}{signature}"
        compared += 1
    assert compared > 10


@by_name
def test_an_op_has_a_reference(op):
    # One op is two others in one pass, and its reference is theirs.
    name = op.name.removesuffix("_with_logprobs")
    assert callable(getattr(rk.reference, name))
    assert name in rk.reference.__all__


@by_name
def test_an_op_is_exported_from_its_module(op):
    assert getattr(rk, op.name) is getattr(import_module(f"radix_kernels.{op.module}"), op.name)
    assert op.name in rk.__all__
    assert rk.capabilities()["ops"][op.name].keys() >= set(op.dtypes)


def test_exports():
    assert set(rk.__all__) == {*_exports.NAMES, *_exports.LAZY, "__version__", "abi_version"}
    assert not [name for name in rk.__all__ if not hasattr(rk, name)]


def test_triton_has_the_functions_that_the_table_names():
    tree = ast.parse((PACKAGE / "triton" / "__init__.py").read_text())
    exported = [n.value for n in tree.body if isinstance(n, ast.Assign)]
    assert len(exported) == 1
    names = {kernel.name for kernel in KERNELS.values() if kernel.triton}
    assert set(ast.literal_eval(exported[0])) == names


@by_name
def test_the_files_of_an_op_exist(op):
    assert (ROOT / "docs" / "kernels" / op.doc).is_file()
    assert (ROOT / "tests" / "kernel" / op.test).is_file()
    for kernel in op.kernels:
        assert (ROOT / "kernel" / "csrc" / "api" / f"{kernel.family}.cpp").is_file()
        binding = ROOT / "kernel" / "csrc" / "bindings" / f"{kernel.family}.cpp"
        is_bound = f'"{kernel.name}"' in binding.read_text() or kernel.family == "activation"
        assert is_bound or not kernel.libraries


def test_packing_is_bound_too():
    text = (ROOT / "kernel" / "csrc" / "bindings" / "linear.cpp").read_text()
    assert all(f'"{kernel.name}"' in text for kernel in PACKING)


@by_name
def test_a_bench_that_an_op_names_times_it(op):
    families = import_module("bench.kernels.families").FAMILIES
    sources = "".join(path.read_text() for path in (ROOT / "bench" / "kernels").rglob("*.py"))
    timed = re.search(rf"\b{op.name}\b", sources) is not None
    assert timed == (op.bench != "")
    assert op.bench in ("", *families)


def test_what_is_written_from_the_table_is_fresh():
    command = [sys.executable, str(ROOT / "tools" / "op_tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{done.stdout}run python tools/op_tables.py"


def rows_of_the_map() -> dict[str, list[str]]:
    """The cells of each op, from the page."""
    page = (ROOT / "docs" / "kernels" / "README.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells for cells in rows}


@by_name
def test_the_map_gives_an_op_the_folders_of_its_chips(op):
    _, native, _, _, kernels, *_ = rows_of_the_map()[op.name]
    generations = {chip[:-1] for chip in re.findall(r"sm_\d+", native)}
    assert {f"sm_{folder[:-1]}" for folder in re.findall(r"`sm(\d+)/", kernels)} == generations
    assert "CPU" in native or "`cpu/" not in kernels
    assert "CUDA" in native or generations or "`gpu/" not in kernels


TOY = """    OpSpec(
        name="toy_double", module="toy", dtypes=FLOATS,
        kernels=(Kernel(name="toy_double", family="toy", libraries=_EVERYWHERE),),
        doc="pointwise.md", test="test_norm.py",
    ),
)
# fmt: on
"""
TOY_OP = '''
from . import _dispatch
from ._lazy import reference


def toy_double(x):
    """2 x, in place."""
    run = _dispatch.native("toy_double", x)
    if run is None:
        reference.toy.toy_double(x)
    else:
        run(x)
'''
TOY_REFERENCE = """
def toy_double(x):
    x *= 2
"""
USE = """
import warnings
import torch
import radix_kernels as rk
from radix_kernels import _dispatch, _loader
from radix_kernels.reference import toy

assert "toy_double" in rk.__all__
entry = rk.capabilities()["ops"]["toy_double"]
assert set(entry) == {"bfloat16", "float16", "float32"}
assert {said["impl"] for said in entry.values()} == {"reference"}
assert len(rk.capabilities()["ops"]) == NUM_OPS + 1
x = torch.ones(3)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    rk.toy_double(x)
assert x.tolist() == [2, 2, 2] and len(seen) == 1 and "runs its reference" in str(seen[0].message)
rk.set_fallback("error")
try:
    rk.toy_double(x)
except RuntimeError as error:
    assert "toy_double on cpu: no kernel" in str(error)
else:
    raise AssertionError("set_fallback is not followed")

class Library:
    @staticmethod
    def toy_double(x):
        x += 40

_loader.bind, _loader.backend = Library, "cpu"
rk.set_fallback("error")
rk.toy_double(x)
assert x.tolist() == [42, 42, 42]
assert rk.capabilities()["ops"]["toy_double"]["float16"]["impl"] == "cpu"
print("followed")
"""


def test_a_new_op_needs_its_entry_and_its_own_files_alone(tmp_path):
    """A copy of the package with one entry more in the table, a module and a reference."""
    copy = tmp_path / "kernel" / "python" / "radix_kernels"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "kernel" / "VERSION", tmp_path / "kernel")
    table = (copy / "_ops.py").read_text()
    assert table.count(")\n# fmt: on\n") == 1
    (copy / "_ops.py").write_text(table.replace(")\n# fmt: on\n", TOY))
    (copy / "toy.py").write_text(TOY_OP)
    (copy / "reference" / "toy.py").write_text(TOY_REFERENCE)
    done = subprocess.run(
        [sys.executable, "-c", USE.replace("NUM_OPS", str(len(OPS)))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(copy.parent), IMPORT_PATH])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "followed", done.stderr
