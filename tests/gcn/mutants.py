"""Faults planted in a library's machine code: an instruction becomes another of its length."""

from __future__ import annotations

import contextlib
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.gcn import assembly, library
from tests.kernel import gpu_objects

_NOP = 0xBF800000
_TEXT_SECTION = ".text"
# An assembler that does not know gfx950 knows what it shares with gfx942.
_READ_AS = {"gfx950": "gfx942"}


@dataclass(frozen=True)
class Mutant:
    """`find` is a pattern of the disassembled instruction, the `nth` match of which in a kernel
    becomes `put`; empty: nothing. In `put`, \\1 and so on are groups of `find`."""

    find: str
    put: str = ""
    nth: int = 0


class Code:
    """A library's code objects of one target."""

    def __init__(self, path: Path, target: str = "gfx942") -> None:
        bundled = gpu_objects.bundled(path.read_bytes())
        self._parts = [elf for arch, elf in bundled if arch == target]
        self._target = target
        self._listings: dict[int, list[tuple[str, str, int, int]]] = {}

    @contextlib.contextmanager
    def planted(self, kernel: str, mutant: Mutant) -> Iterator[str]:
        """While this is open, launches of the kernel (a symbol) run the mutant; gives the line that
        it replaces. LookupError where the kernel has no such instruction."""
        part, address, words, line, text = self._find(kernel, mutant)
        elf = self._parts[part]
        changed = bytearray(elf)
        start = _file_offset(elf, address)
        changed[start : start + 4 * words] = self._encode(text, words)
        stand_in = library.load()
        assert stand_in.gcn_replace(bytes(changed), len(changed)) > 0
        try:
            yield line
        finally:
            assert stand_in.gcn_replace(elf, len(elf)) > 0

    def _find(self, kernel: str, mutant: Mutant) -> tuple[int, int, int, str, str]:
        left = mutant.nth
        for part in range(len(self._parts)):
            for symbol, line, address, words in self._listing(part):
                if symbol != kernel or not (match := re.fullmatch(mutant.find, line)):
                    continue
                if not left:
                    return part, address, words, line, match.expand(mutant.put)
                left -= 1
        raise LookupError(f"{kernel} has no instruction {mutant.nth} like {mutant.find}")

    def _listing(self, part: int) -> list[tuple[str, str, int, int]]:
        """(symbol, instruction, address, words) of every instruction."""
        if part not in self._listings:
            self._listings[part] = _instructions(library.disassembly(self._parts[part]))
        return self._listings[part]

    def _encode(self, text: str, words: int) -> bytes:
        read_as = _READ_AS.get(self._target, self._target)
        code = _assemble(text, read_as) if text else b""
        assert len(code) <= 4 * words and len(code) % 4 == 0, (text, words)
        return code + struct.pack("<I", _NOP) * (words - len(code) // 4)


def _instructions(text: str) -> list[tuple[str, str, int, int]]:
    found = []
    symbol = ""
    for line in text.splitlines():
        if begin := re.match(r"[0-9a-f]+ <(.+)>:$", line):
            symbol = begin[1]
        elif row := re.match(r"\t(\S.*?)\s*// ([0-9A-F]+):((?: [0-9A-F]{8})+)", line):
            found.append((symbol, row[1], int(row[2], 16), len(row[3]) // 9))
    return found


def _assemble(text: str, target: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "one.s")
        out = Path(folder, "one.o")
        source.write_text(f".text\n{text}\n")
        command = [assembly.compiler(), "-target", "amdgcn-amd-amdhsa", f"-mcpu={target}", "-c"]
        subprocess.run([*command, str(source), "-o", str(out)], check=True)
        elf = out.read_bytes()
    _, offset, size = _text_section(elf)
    return elf[offset : offset + size]


def _file_offset(elf: bytes, address: int) -> int:
    base, offset, _ = _text_section(elf)
    return offset + address - base


def _text_section(elf: bytes) -> tuple[int, int, int]:
    """(address, offset in the file, bytes) of .text."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    for header in headers:
        start = headers[names][4] + header[0]
        if elf[start : elf.index(b"\0", start)].decode() == _TEXT_SECTION:
            return header[3], header[4], header[5]
    raise ValueError("no .text")
