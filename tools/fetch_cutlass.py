"""Finds CUTLASS's headers for a build of the CUDA backend, and prints their folder.

`RADIX_CUTLASS_DIR` where it is set (`none`: build without). Else PyPI's package `nvidia-cutlass`,
which holds the headers, is fetched into build/cutlass. Prints nothing where that fails or where
none of the families needs them: CMake then looks further, and says what is missing
(cmake/RadixSm80.cmake).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "nvidia-cutlass==4.2.0.0"  # as cmake/RadixSm80.cmake
SOURCE = "cutlass_library/source"  # the headers' folder, in the package


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
    if not is_whole(folder) and not install(folder):
        return ""
    return str(folder / SOURCE)


def is_whole(folder: Path) -> bool:
    """Whether the headers are there: of an installation that was broken off, the folders may be."""
    return (folder / SOURCE / "include/cutlass/version.h").exists()


def install(folder: Path) -> bool:
    """Puts the package into `folder`, in place of what is there, once all of it is unpacked; False,
    and a line on stderr, where pip fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="cutlass-", dir=folder.parent) as temporary:
        unpacked = Path(temporary) / "package"
        # Its dependencies are those of its own code generator.
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--target", str(unpacked), PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            problem = done.stderr.strip().splitlines()[-1:]
            print(f"{PACKAGE} cannot be installed: {' '.join(problem)}", file=sys.stderr)
            return False
        if not is_whole(unpacked):
            print(f"{PACKAGE} has no headers in {SOURCE}/include", file=sys.stderr)
            return False
        if not is_whole(folder):  # another build may have been faster
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(unpacked, folder)
    return True


if __name__ == "__main__":
    print(cutlass_dir(" ".join(sys.argv[1:])))
