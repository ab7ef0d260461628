"""Writes what follows from the table of ops: `python tools/op_tables.py` (`--check` only compares).

    kernel/python/radix_kernels/__init__.pyi    the exports, for type checkers
    docs/kernels/README.md                      the map of ops, between its two markers

The table is `radix_kernels/_ops.py`. It is read without loading the native library.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KERNEL = ROOT / "kernel"
PACKAGE = KERNEL / "python" / "radix_kernels"
STUB = PACKAGE / "__init__.pyi"
MAP = ROOT / "docs" / "kernels" / "README.md"
BEGIN = "<!-- the map of ops: python tools/op_tables.py -->\n"
END = "<!-- end of the map -->\n"

_BARE = "radix_kernels_without_its_init"

# Folders of csrc that hold no kernels.
_NO_KERNELS = ("api", "bindings", "common")
_NAMES = {"cpu": "CPU", "cuda": "CUDA", "rocm": "ROCm"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if stale")
    check = parser.parse_args().check
    stale = [path for path, text in texts().items() if path.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is stale' if check else 'written'}")
        if not check:
            path.write_text(texts()[path])
    return 1 if check and stale else 0


def texts() -> dict[Path, str]:
    """Each file that follows from the table, as it should be."""
    page = MAP.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return {STUB: stub(), MAP: before + BEGIN + op_map() + END + after}


def stub() -> str:
    """`__init__.pyi`."""
    exports = _load("_exports")
    by_module = sorted((module, name) for name, module in (exports.NAMES | exports.LAZY).items())
    lines = [
        "# Written by tools/op_tables.py from the table of ops.",
        "",
        "from . import _loader as _loader",
        "from . import reference as reference",
        "from . import torch_ops as torch_ops",
    ]
    for module, pairs in groupby(by_module, key=itemgetter(0)):
        lines += [f"from .{module} import {name} as {name}" for _, name in pairs]
    lines += ["", "__version__: str", "abi_version: int | None", ""]
    return "\n".join(lines)


def op_map() -> str:
    """The map in Markdown: what runs each op, and the files that are about it."""
    titles = (
        "op", "native", "otherwise", "C++ family", "kernels", "Python", "doc", "test", "bench",
    )  # fmt: skip
    lines = ["", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for op in _load("_ops").OPS:
        families = list(dict.fromkeys(kernel.family for kernel in op.kernels))
        by_family = sorted(op.kernels, key=lambda kernel: families.index(kernel.family))
        kernels = dict.fromkeys(path for kernel in by_family for path in kernel_folders(kernel))
        cells = [
            f"`{op.name}`",
            ", ".join(_native(op)),
            _otherwise(op),
            ", ".join(f"`{family}`" for family in families),
            ", ".join(f"`{path}`" for path in kernels),
            f"`{op.module}.py`",
            f"[{op.doc.removesuffix('.md')}]({op.doc})",
            f"`{op.test}`",
            f"`{op.bench}`" if op.bench else "-",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", ""])


def kernel_folders(kernel: Any) -> list[str]:
    """Where csrc has the kernel for its libraries: folders of its family's name, or files that
    begin with it."""
    csrc = KERNEL / "csrc"
    family = kernel.family
    found = set()
    for path in csrc.rglob(f"{family}*"):
        relative = path.relative_to(csrc)
        if relative.parts[0] in _NO_KERNELS or not _serves(relative.parts[0], kernel):
            continue
        if path.is_dir() and path.name == family:
            found.add(f"{relative.as_posix()}/")
        elif path.stem == family and path.suffix == ".cu" and path.parent.name != family:
            found.add(relative.as_posix())
    return sorted(found)


def _serves(folder: str, kernel: Any) -> bool:
    """Whether a library that has the kernel is built from this folder of csrc."""
    libraries = kernel.libraries
    if folder == "cpu":
        return any(library.backend == "cpu" for library in libraries)
    if folder == "gpu":
        return any(library.backend != "cpu" for library in libraries)
    on_nvidia = [library for library in libraries if library.backend == "cuda"]
    return any(
        not library.archs or folder in map(_folder_of_chip, library.archs) for library in on_nvidia
    )


def _folder_of_chip(arch: str) -> str:
    """The folder of kernels for NVIDIA's `sm_89`: `sm80`, the newest that is no newer."""
    numbers = [int(path.name[2:]) for path in (KERNEL / "csrc").glob("sm[0-9]*")]
    chip = int(arch.removeprefix("sm_"))
    return f"sm{max(number for number in numbers if number <= chip)}"


def _native(op: Any) -> list[str]:
    found: list[str] = []
    for kernel in op.kernels:
        for library in kernel.libraries:
            found += library.archs or (_NAMES[library.backend],)
    return list(dict.fromkeys(found))


def _otherwise(op: Any) -> str:
    found = ["reference"]
    if any(kernel.torch for kernel in op.kernels):
        found.insert(0, "torch")
    if any(kernel.triton for kernel in op.kernels):
        found.insert(0, "Triton")
    return ", ".join(found)


def _load(name: str) -> ModuleType:
    """A module of the package that imports nothing but its like, without the package."""
    if _BARE not in sys.modules:
        package = ModuleType(_BARE)
        package.__path__ = [str(PACKAGE)]
        sys.modules[_BARE] = package
    return importlib.import_module(f"{_BARE}.{name}")


if __name__ == "__main__":
    sys.exit(main())
