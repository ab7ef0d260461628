"""Builds and loads the stand-in `libamdhip64.so.7`."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).with_name("src")
FOLDER = ROOT / "build/gcn"
NAME = "libamdhip64.so.7"
# One function for 64 lanes is a loop that the compiler makes vectors of. Numbers are IEEE's: no
# contraction, no fast math.
FLAGS = (
    "-std=c++20 -O3 -march=native -mprefer-vector-width=512 -fno-math-errno -fno-trapping-math"
    " -ffp-contract=off -fPIC -fvisibility=hidden -Wall -Wextra -Wno-missing-field-initializers"
).split()


def objdump() -> str | None:
    """LLVM's disassembler, of a version that knows gfx942."""
    places = [f"/usr/lib/llvm-{n}/bin" for n in (21, 20, 19)]
    path = os.pathsep.join(["/opt/rocm/llvm/bin", *places, os.environ.get("PATH", "")])
    return shutil.which("llvm-objdump", path=path) or shutil.which("llvm-objdump-19")


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("c++")


@functools.cache
def build() -> Path:
    """The stand-in's path; compiled unless these very sources were before."""
    program = compiler()
    if program is None:
        raise RuntimeError("the executor needs g++ 12 or later")
    files = sorted(SOURCES.iterdir())
    digest = hashlib.sha256(" ".join([program, *FLAGS]).encode() + _cpu())
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    folder = FOLDER / digest.hexdigest()[:16]
    library = folder / NAME
    if library.exists():
        return library
    own = FOLDER / f"build.{os.getpid()}"
    own.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> str:
        out = str(own / f"{source.stem}.o")
        subprocess.run([program, *FLAGS, "-c", str(source), "-o", out], check=True)
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, [f for f in files if f.suffix == ".cpp"]))
    link = [program, "-shared", *objects, f"-Wl,-soname,{NAME}", "-o", str(own / NAME)]
    subprocess.run([*link, "-pthread", "-lrt"], check=True)
    folder.mkdir(exist_ok=True)
    os.replace(own / NAME, library)
    shutil.rmtree(own)
    return library


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, for another that finds the stand-in: GCN_TARGET and GCN_DEVICES
    as given."""
    return {**_settings(), **os.environ, **changes}


def _settings() -> dict[str, str]:
    library = build()
    cache = library.parent / "disassembly"  # of these very sources: they rewrite gfx950's
    cache.mkdir(exist_ok=True)
    return {
        "RADIX_LIBHIP": str(library),
        "GCN_CACHE": str(cache),
        "LLVM_OBJDUMP": objdump() or "llvm-objdump",
    }


@functools.cache
def load() -> ctypes.CDLL:
    """The stand-in in this process, which HIP's users here then share."""
    os.environ.update(environment())
    library = ctypes.CDLL(os.environ["RADIX_LIBHIP"])
    library.gcn_report.restype = ctypes.c_char_p
    library.hipGetErrorString.restype = ctypes.c_char_p
    for name in ("gcn_map", "gcn_unmap"):
        getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


def disassembly(elf: bytes) -> str:
    """What the executor reads of a code object: of gfx950's too, whose instructions LLVM 19 does
    not know."""
    settings = _settings()
    library = ctypes.CDLL(settings["RADIX_LIBHIP"])
    library.gcn_disassembly.restype = ctypes.c_char_p
    with mock.patch.dict(os.environ, settings):  # not for good: HIP's users here may want another
        text: bytes = library.gcn_disassembly(elf, ctypes.c_size_t(len(elf)))
    if not text:
        raise ValueError("this is no code object that the executor knows")
    return text.decode()


def report() -> dict[str, Any]:
    """What this process has executed: launches, wave instructions, seconds, opcodes."""
    facts: dict[str, Any] = json.loads(load().gcn_report())
    return facts


def _cpu() -> bytes:
    """What -march=native means."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith("flags")), "").encode()
