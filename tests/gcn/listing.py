"""A compiler's assembly in the form of a disassembly, for code that no disassembler here knows."""

from __future__ import annotations

import re
import struct

_DYNAMIC_SYMBOLS = 11  # SHT_DYNSYM
_LABEL = re.compile(r"([.\w$]+):")
_BRANCH = re.compile(r"(s_c?branch\w*)\s+([.\w$]+)")


def listing(assembly: str, entry: int) -> str:
    """Lines of llvm-objdump's form for the one function of `assembly`.

    Each instruction stands at an address of its own, four bytes behind the one before, the first at
    `entry`: where the code really lies cannot be told, and matters to nothing but jumps by address,
    which are refused.
    """
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in assembly.splitlines():
        text = line.partition(";")[0].strip()
        if text.startswith(".section") and instructions:
            break  # the kernel descriptor and the metadata follow
        if label := _LABEL.fullmatch(text):
            labels[label[1]] = len(instructions)
        elif text and not text.startswith("."):
            instructions.append(text)
    lines = []
    for index, text in enumerate(instructions):
        if text.startswith(("s_getpc", "s_setpc", "s_swappc")):
            raise ValueError(f"{text}: addresses of code are not known here")
        branch = _BRANCH.fullmatch(text)
        if branch:
            step = labels[branch[2]] - index - 1
            text = f"{branch[1]} {step & 0xFFFF}"
        lines.append(f"\t{text} // {entry + 4 * index:012X}: 00000000")
    return "\n".join(lines) + "\n"


def address_of(elf: bytes, symbol: str) -> int:
    """Where a function begins: the value of an ELF file's dynamic symbol."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count = struct.unpack_from("<HH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]
    for _, kind, _, _, offset, length, link, _, _, entry in sections:
        if kind != _DYNAMIC_SYMBOLS:
            continue
        names = sections[link][4]
        for at in range(offset, offset + length, entry):
            name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", elf, at)
            end = elf.index(b"\0", names + name)
            if elf[names + name : end] == symbol.encode():
                return int(value)
    raise ValueError(f"the code object has no function {symbol}")
