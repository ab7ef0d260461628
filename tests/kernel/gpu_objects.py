"""What device code a GPU library holds: kernels by name, registers, spills, instructions.

Reads the compiler's own records (ELF notes, cuobjdump); nothing here needs a GPU.
"""

from __future__ import annotations

import collections
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.gcn import library as stand_in

ROOT = Path(__file__).resolve().parents[2]
_BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"


def short_names(mangled: list[str]) -> list[str]:
    """`rmsnorm_kernel<8, bf16, float>` for each symbol; a constant of an enum is its number."""
    text = subprocess.run(
        ["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True
    ).stdout
    names = []
    for line in text.splitlines():
        plain = re.sub(r"^void |\(anonymous namespace\)::|\b[a-z]\w*::", "", line)
        names.append(
            re.sub(r"\(\w+\)(?=[-\w])", "", plain.split("(")[0] if "<" not in plain else plain)
        )
    return [re.match(r"\w+(<[^(]*>)?", name)[0] for name in names]  # type: ignore[index]


def tool(*names: str) -> str | None:
    """The first of these programs that is installed."""
    return next(filter(None, map(shutil.which, names)), None)


def need(what: str, found: object) -> None:
    """Skips the module when a compiler is missing, or fails where REQUIRE names it."""
    if not found:
        text = f"the {what} compiler or its tools are not installed"
        if what in os.environ.get("REQUIRE", "").split(","):
            pytest.fail(text)
        pytest.skip(text)


def importable(folder: Path) -> str:
    """What `capabilities()` of an unpacked wheel says, by an interpreter that sees nothing else."""
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r})\n"
        "import radix_kernels as rk\n"
        "facts = rk.capabilities()\n"
        "print(facts['backend'], facts['isa'], facts['devices'], rk._loader.reason, sep='|')\n"
        "print(facts['ops']['rmsnorm']['bfloat16'])"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ------------------------------------------------------------------ AMD


@dataclass(frozen=True)
class AmdKernel:
    """One kernel in one code object; `facts` are the metadata's integers."""

    facts: dict[str, int]
    instructions: collections.Counter[str]
    literals: frozenset[str]  # constants of 32 bits in the code, as 0x5f7ffffc


@dataclass(frozen=True)
class AmdObject:
    abi_version: int
    flags: int  # as the ELF header has them
    kernels: dict[str, AmdKernel]


def amd_objects(library: Path) -> dict[str, list[AmdObject]]:
    """gfx target -> its code objects, one for each source file with kernels."""
    found = collections.defaultdict(list)
    for target, elf in bundled(library.read_bytes()):
        found[target].append(_amd_object(elf))
    return found


def bundled(blob: bytes) -> list[tuple[str, bytes]]:
    """(gfx target, code object) of all offload bundles in a library."""
    assert b"CCOB" not in blob, "a compressed bundle: old runtimes cannot read it"
    out, at = [], blob.find(_BUNDLE)
    while at >= 0:
        (count,) = struct.unpack_from("<Q", blob, at + 24)
        entry = at + 32
        for _ in range(count):
            offset, size, length = struct.unpack_from("<QQQ", blob, entry)
            triple = blob[entry + 24 : entry + 24 + length].decode()
            entry += 24 + length
            if triple.startswith("hip") and size:
                out.append((triple.rpartition("-")[2], blob[at + offset : at + offset + size]))
        at = blob.find(_BUNDLE, entry)
    return out


def _amd_object(elf: bytes) -> AmdObject:
    with tempfile.NamedTemporaryFile(suffix=".hsaco") as file:
        file.write(elf)
        file.flush()
        notes = _run("llvm-readelf", "-h", "--notes", file.name)
    counts, literals = _instructions(stand_in.disassembly(elf))
    mangled, facts = [], []
    for text in re.split(r"(?m)^  - (?=\.agpr_count)", notes)[1:]:
        mangled.append(re.search(r"\.name: +(\S+)", text)[1])  # type: ignore[index]
        facts.append({k: int(v) for k, v in re.findall(r"(?m)^ *\.(\w+): +(\d+)$", text)})
        facts[-1]["dynamic_stack"] = int("uses_dynamic_stack: true" in text)
    kernels = {
        short: AmdKernel(
            facts=values, instructions=counts[name], literals=frozenset(literals[name])
        )
        for short, name, values in zip(short_names(mangled), mangled, facts, strict=True)
    }
    version = re.search(r"ABI Version: +(\d+)", notes)
    flags = re.search(r"Flags: +(0x[0-9A-F]+)", notes)
    assert version and flags
    return AmdObject(abi_version=int(version[1]), flags=int(flags[1], 16), kernels=kernels)


def _instructions(
    disassembly: str,
) -> tuple[dict[str, collections.Counter[str]], dict[str, set[str]]]:
    """Of each function its instructions, and the literal constants in them."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    literals: dict[str, set[str]] = collections.defaultdict(set)
    current = ""
    for line in disassembly.splitlines():
        if begin := re.match(r"[0-9a-f]+ <(.+)>:$", line):
            current = begin[1]
        elif op := re.match(r"\s+([a-z]\w+)", line):
            counts[current][re.sub(r"_e(32|64)$", "", op[1])] += 1
            literals[current].update(re.findall(r"0x[0-9a-f]{8}\b", line.partition("//")[0]))
    return counts, literals


def _run(name: str, *args: str) -> str:
    program = llvm(name)
    assert program
    return subprocess.run([program, *args], capture_output=True, text=True, check=True).stdout


def llvm(name: str) -> str | None:
    """An LLVM tool by any of its names, ROCm's first."""
    places = "/opt/rocm/llvm/bin", *(f"/usr/lib/llvm-{n}/bin" for n in (21, 20, 19))
    path = os.pathsep.join([*places, os.environ.get("PATH", "")])
    return shutil.which(name, path=path) or tool(*(f"{name}-{n}" for n in (21, 20, 19)))


# ------------------------------------------------------------------ NVIDIA


@dataclass(frozen=True)
class CudaKernel:
    registers: int
    stack: int
    shared: int
    local: int


def cuda_kernels(library: Path) -> dict[str, dict[str, CudaKernel]]:
    """sm_XX -> kernels in its machine code."""
    program = cuobjdump()
    assert program
    text = subprocess.run(
        [program, "-res-usage", str(library)], capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, dict[str, CudaKernel]] = collections.defaultdict(dict)
    rows: list[tuple[str, str, CudaKernel]] = []
    arch = ""
    pattern = r"arch = (\S+)|Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"
    for match in re.finditer(pattern, text):
        if match[1]:
            arch = match[1]
            continue
        kernel = CudaKernel(
            registers=int(match[3]),
            stack=int(match[4]),
            shared=int(match[5]),
            local=int(match[6]),
        )
        rows.append((arch, match[2], kernel))
    symbols: dict[str, str] = {}
    for short, (arch, symbol, kernel) in zip(short_names([r[1] for r in rows]), rows, strict=True):
        assert symbols.setdefault(short, symbol) == symbol, f"two kernels are {short}"
        found[arch][short] = kernel
    return found


def cuda_operations(library: Path, kernel: str) -> dict[str, list[str]]:
    """Of each kernel with that in its symbol, what its machine code does about barriers and
    registers, in order."""
    program = cuobjdump()
    assert program
    usage = subprocess.run(
        [program, "-res-usage", str(library)], capture_output=True, text=True, check=True
    ).stdout
    found = {}
    for name in re.findall(rf"Function (\w*{kernel}\w*):", usage):
        command = [program, "-sass", "-fun", name, str(library)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found[name] = re.findall(
            r"(?m)^\s+/\*[0-9a-f]+\*/ [^;/]*?\b((?:USETMAXREG|BAR)\.[^;]*?) ;", text
        )
    return found


def ptx_kernels(library: Path) -> dict[str, set[str]]:
    """sm_XX -> kernels in its PTX."""
    program = cuobjdump()
    assert program
    text = subprocess.run([program, "-ptx", str(library)], capture_output=True, text=True).stdout
    found: dict[str, set[str]] = collections.defaultdict(set)
    target = ""
    for match in re.finditer(r"(?m)^\.target (\w+)|\.entry (\w+)", text):
        if match[1]:
            target = match[1]
        else:
            found[target].update(short_names([match[2]]))
    return found


def cuobjdump() -> str | None:
    """The toolkit's, or the one that Triton's package brings."""
    here = Path(sys.prefix).glob("lib/python3.*/site-packages/triton/backends/nvidia/bin/cuobjdump")
    return tool("cuobjdump", "/usr/local/cuda/bin/cuobjdump", *map(str, here))


def run_emulated(program: str, folder: Path) -> str:
    """What a program of emulated_gpu prints: device code of csrc/gpu, compiled by g++ in a folder,
    which comes first where files are looked for."""
    compiler = tool("g++", "c++")
    need("c++", compiler)
    here, csrc = ROOT / "tests/kernel/emulated_gpu", ROOT / "kernel/csrc"
    includes = [f"-I{path}" for path in (folder, here, ROOT / "kernel/include", csrc)]
    sources = [str(here / f"{program}.cpp"), str(csrc / "common/error.cpp")]
    command = [
        str(compiler),
        "-std=c++17",
        "-O1",
        "-w",
        *includes,
        *sources,
        "-o",
        str(folder / program),
        "-lpthread",
    ]
    subprocess.run(command, check=True, timeout=250)
    done = subprocess.run([folder / program], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout
