"""Bundles the code of several AMD GPUs into the one file that HIP's host objects embed.

    hip_bundle.py OUTPUT gfx942=CODE_OBJECT ...

The format is that of clang-offload-bundler: a magic word, the number of entries, then offset, size,
length of the name and name of each, and the code objects at multiples of 4,096. The tool itself is
not used: it writes the name of a target that its LLVM does not know in a form that no HIP runtime
finds. The first entry is the host's, and empty.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping
from pathlib import Path

MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
ALIGNMENT = 4096
HOST = "host-x86_64-unknown-linux-gnu-"
GPU = "hipv4-amdgcn-amd-amdhsa--"


def bundle(code: Mapping[str, bytes]) -> bytes:
    """The bundle of code objects by target."""
    names = [HOST.encode(), *(f"{GPU}{target}".encode() for target in code)]
    contents = [b"", *code.values()]
    header = len(MAGIC) + 8 + sum(24 + len(name) for name in names)
    entries = bytearray(MAGIC + struct.pack("<Q", len(names)))
    body = bytearray()
    for name, content in zip(names, contents, strict=True):
        body += bytes(-(header + len(body)) % ALIGNMENT)
        entries += struct.pack("<QQQ", header + len(body), len(content), len(name)) + name
        body += content
    return bytes(entries + body)


def main(output: str, *parts: str) -> None:
    code = {}
    for part in parts:
        target, _, file = part.partition("=")
        code[target] = Path(file).read_bytes()
    Path(output).write_bytes(bundle(code))


if __name__ == "__main__":
    main(*sys.argv[1:])
