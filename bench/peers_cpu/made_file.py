"""Files that benches write once and find again."""

from __future__ import annotations

from pathlib import Path


def is_current(path: Path, *sources: Path) -> bool:
    """Whether the file is there and newer than all that it follows from."""
    newest = max(source.stat().st_mtime for source in sources)
    return path.exists() and path.stat().st_mtime > newest
