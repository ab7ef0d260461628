"""Where the HIP runtime lies that other packages will load, found without importing torch.

Two copies of it in one process know nothing of each other's memory, so the kernels use the copy
that torch uses, or will use once it is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path


def bundled() -> list[str]:
    """Files of the runtime, the preferred one first: torch's own, or the one of AMD's Python
    packages; empty where torch is built for the system's, and where there are none."""
    torch = _folder("torch")
    if torch is not None:
        own = sorted((torch / "lib").glob("libamdhip64.so*"))
        if own:
            return [str(path) for path in own]
        by_rocm_sdk = (torch / "_rocm_init.py").exists()
        if (torch / "lib/libtorch_hip.so").exists() and not by_rocm_sdk:
            return []
    return _of_rocm_sdk()


def _of_rocm_sdk() -> list[str]:
    """By the function that torch itself asks; it imports nothing native."""
    if _folder("rocm_sdk") is None:
        return []
    try:
        return [
            str(path) for path in importlib.import_module("rocm_sdk").find_libraries("amdhip64")
        ]
    except Exception:  # an installation without its libraries: whatever it raises, it brings none
        return []


def _folder(package: str) -> Path | None:
    """A package's folder, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent
