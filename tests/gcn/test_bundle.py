"""The bundle of code objects that the ROCm library embeds: clang's own format."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "cmake/hip_bundle.py"


def bundled(folder: Path, targets: dict[str, bytes]) -> Path:
    """A bundle of these code objects, made as the build makes it."""
    parts = []
    for target, content in targets.items():
        (folder / f"{target}.co").write_bytes(content)
        parts.append(f"{target}={folder / target}.co")
    output = folder / "code.hipfb"
    subprocess.run([sys.executable, str(TOOL), str(output), *parts], check=True)
    return output


@pytest.mark.parametrize("sizes", [(1, 4096), (5000, 0, 4097)])
def test_bytes_are_those_of_clangs_tool(sizes: tuple[int, ...], tmp_path: Path) -> None:
    bundler = shutil.which("clang-offload-bundler-19")
    if bundler is None:
        pytest.skip("needs clang-offload-bundler-19")
    names = ("gfx90a", "gfx942", "gfx1100")
    targets = {
        name: bytes([index + 1]) * size
        for index, (name, size) in enumerate(zip(names, sizes, strict=False))
    }
    found = bundled(tmp_path, targets)
    entries = ["host-x86_64-unknown-linux-gnu", *(f"hipv4-amdgcn-amd-amdhsa--{t}" for t in targets)]
    inputs = ["/dev/null", *(f"{tmp_path / target}.co" for target in targets)]
    subprocess.run(
        [
            bundler,
            "-type=o",
            "-bundle-align=4096",
            f"-targets={','.join(entries)}",
            *(f"-input={file}" for file in inputs),
            f"-output={tmp_path / 'reference'}",
        ],
        check=True,
    )
    assert found.read_bytes() == (tmp_path / "reference").read_bytes()


def test_a_target_that_the_tool_does_not_know(tmp_path: Path) -> None:
    """The name has no dash behind it: a HIP runtime looks for exactly this one."""
    data = bundled(tmp_path, {"gfx942": b"a", "gfx950": b"b"}).read_bytes()
    header = data[: data.index(b"\0" * 64)]
    assert header.endswith(b"hipv4-amdgcn-amd-amdhsa--gfx950")
