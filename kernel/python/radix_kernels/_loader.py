"""Finds the native library. `bind` is the binding module, or None with the reason in `reason`."""

from __future__ import annotations

import importlib
import platform
from pathlib import Path
from types import ModuleType

bind: ModuleType | None = None
reason = ""
try:
    bind = importlib.import_module("radix_kernels._bind")
except ImportError:
    version_text = ".".join(platform.python_version_tuple()[:2])
    reason = f"no native library for CPython {version_text} in this installation"

_VERSION_FILE = Path(__file__).resolve().parents[2] / "VERSION"
version = _VERSION_FILE.read_text().strip() if _VERSION_FILE.exists() else "0.0.0"
backend: str | None = bind.backend if bind else None
abi_version: int | None = bind.abi_version if bind else None
