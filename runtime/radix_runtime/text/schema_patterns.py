"""Regular expressions of JSON Schemas, in a form whose characters a grammar keeps in JSON."""

# In the text of JSON a quote, a backslash and a control character are escapes. llguidance 1.9 takes
# a class that has control characters and lacks one of the other two as if it had that one: [^"]
# lets \" through. Without control characters the class is right.

import re
from collections.abc import Iterator

_CONTROL = "\x1f"
_ESCAPED = ('"', "\\")
_SET_MARKS = re.compile(r"(?<!\\)([\[&~|])")
_NO_CONTROLS = "\\x00-\\x1f"


def safe_pattern(pattern: str) -> str | None:
    """`pattern` without the control characters of the classes that would go wrong; None where that
    cannot be told."""
    safe = ""
    for piece in _pieces(pattern):
        if not piece.startswith("["):
            safe += piece
            continue
        if "--" in piece:
            return None  # a range to some, a difference of sets to others
        piece = _plain_class(piece)
        try:
            one = re.compile(piece, re.ASCII)
        except re.error:
            return None if any(mark in piece for mark in ('"', "\\\\", "[^")) else pattern
        is_wrong = one.match(_CONTROL) and not all(one.match(char) for char in _ESCAPED)
        if is_wrong and not piece.startswith("[^"):
            return None
        safe += f"{piece[:-1]}{_NO_CONTROLS}]" if is_wrong else piece
    return safe


def _plain_class(piece: str) -> str:
    """A class in which nothing stands for sets inside it, as it does in Rust."""
    return "[" + _SET_MARKS.sub(r"\\\1", piece[1:])


def _pieces(pattern: str) -> Iterator[str]:
    """The classes of a pattern, and what stands between them, in order."""
    position = 0
    while position < len(pattern):
        char = pattern[position]
        end = position + (2 if char == "\\" else 1)
        if char == "[":
            end = _end_of_class(pattern, position)
        yield pattern[position:end]
        position = end


def _end_of_class(pattern: str, start: int) -> int:
    position = start + 1
    if pattern[position : position + 1] == "^":
        position += 1
    while position < len(pattern) and pattern[position] != "]":
        position += 2 if pattern[position] == "\\" else 1
    return min(position + 1, len(pattern))
