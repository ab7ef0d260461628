"""Finds CUTLASS's headers for a build of the CUDA backend, and prints their folder.

`RADIX_CUTLASS_DIR` where it is set (`none`: build without). Else PyPI's package `nvidia-cutlass`,
which holds the headers, is fetched into build/cutlass. Prints nothing where that fails or where
none of the families needs them: CMake then looks further, and says what is missing
(cmake/RadixSm80.cmake).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "nvidia-cutlass==4.2.0.0"  # as cmake/RadixSm80.cmake


def needs_cutlass(families: str) -> bool:
    """Whether a build of these families (names apart by spaces, commas or semicolons; '': of all)
    has kernels from CUTLASS."""
    wanted = set(re.split("[ ,;]+", families.strip())) - {""}
    with_cutlass = {path.parent.name for path in ROOT.glob("kernel/csrc/sm80/*/sources.cmake")}
    return not wanted or bool(wanted & with_cutlass)


def cutlass_dir(families: str) -> str:
    """What CMake's RADIX_CUTLASS_DIR is to be; '' where CMake has to look."""
    given = os.environ.get("RADIX_CUTLASS_DIR", "")
    if given or not needs_cutlass(families):
        return given
    folder = ROOT / "build/cutlass"
    source = folder / "cutlass_library/source"
    if not source.exists():
        # Its dependencies are those of its own code generator.
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--target", str(folder), PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            problem = done.stderr.strip().splitlines()[-1:]
            print(f"{PACKAGE} cannot be installed: {' '.join(problem)}", file=sys.stderr)
            return ""
    return str(source)


if __name__ == "__main__":
    print(cutlass_dir(" ".join(sys.argv[1:])))
