"""The AMX kernels on a machine without AMX: their tile instructions emulated, all else as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import radix_kernels as rk
from radix_kernels import _loader
from tests.child import run_at_level
from tests.kernel import isa_levels
from tests.marks import needs_cpu_library

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.cpu_only,
    needs_cpu_library,
    pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler"),
    pytest.mark.builds(),
    pytest.mark.timeout(1800),  # that of the first test counts the build too
]

ATTENTION = """
import torch, radix_kernels as rk
rng = torch.Generator().manual_seed(1)
q, k, v = (torch.randn(300, 2, 64, generator=rng).bfloat16() for _ in range(3))
ends = torch.tensor([0, 300], dtype=torch.int32)
out = rk.flash_attn_varlen(q, k, v, ends, ends)
print(rk._loader.bind.isa(), hash(tuple(out.flatten().tolist())))
"""
PRODUCT = """
import torch, radix_kernels as rk
rng = torch.Generator().manual_seed(1)
x, w = (torch.randn(n, 300, generator=rng).bfloat16() for n in (70, 48))
out = rk.linear(x, rk.pack_weight(w, kind="w4a8", group=32), keep_x=True)
print(rk._loader.bind.isa(), hash(tuple(out.flatten().tolist())))
"""


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of the library: where its package lies. It names all families, since a build of some
    is private: that of the library would be placed into the sources."""
    folder = tmp_path_factory.mktemp("emulated")
    for name in ("CMakeLists.txt", "cmake", "kernel"):
        (folder / name).symlink_to(ROOT / name)
    families = sorted(file.parent.name for file in ROOT.glob("kernel/csrc/cpu/*/sources.cmake"))
    only = ";".join(families)
    build = {
        "PYTHON": sys.executable,
        "JOBS": "2",
        "BACKEND": "cpu",
        "ONLY": only,
        "CXXFLAGS": "-DRADIX_EMULATE_TILES",
    }
    command = ["sh", str(ROOT / "tools/dev_build.sh")]
    subprocess.run(
        command,
        env={**os.environ, **build},
        cwd=folder,
        check=True,
        capture_output=True,
        timeout=900,
    )
    return folder / f"build/cpu-{only.replace(';', '-')}/python"


def run(level: str, path: Path, *command: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RADIX_TEST_TILES", "emulated")
        done = run_at_level(level, *command, path=str(path))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    return done.stdout


def check(level: str, path: Path, probe: str, files: Sequence[str]) -> None:
    """That the tiles change the bits of `probe`, and the tests in these files pass on them."""
    installed = Path(_loader.__file__).parents[1]
    assert run(level, path, "-c", probe) != run(level, installed, "-c", probe), (
        f"the emulated library runs the kernels of {level}"
    )
    tests = [f"tests/{name}.py" for name in files]
    options = ("-q", "-x", "-p", "no:cacheprovider", "-o", "pythonpath=.")
    run(level, path, "-m", "pytest", *options, *tests)


needs_bf16 = pytest.mark.skipif(
    rk.capabilities().get("isa") not in ("avx512_bf16", "amx"), reason="no AVX512-BF16"
)


def test_attention(emulated: Path) -> None:
    names = ("attention", "attention_int8", "attention_merge")
    check("avx2", emulated, ATTENTION, [f"kernel/test_{name}" for name in names])


@needs_bf16
def test_products(emulated: Path) -> None:
    names = [name for name in isa_levels.FAMILIES if name.startswith(("linear", "packed_"))]
    names += ["packed_experts_codes", "packed_experts_few"]
    check("avx512_bf16", emulated, PRODUCT, [f"kernel/test_{name}" for name in names])


@needs_bf16
def test_decoder(emulated: Path) -> None:
    """Prompts' products keep x on tiles, so that a step's tokens are multiplied in two parts."""
    names = [name for name in isa_levels.FAMILIES if name.startswith("decoder")]
    files = [f"kernel/test_{name}" for name in names]
    check("avx512_bf16", emulated, PRODUCT, [*files, "runtime/test_one_call"])
