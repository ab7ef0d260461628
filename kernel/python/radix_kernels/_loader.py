"""Finds the native library. `bind` is the binding module, or None with the reason in `reason`.

A wheel holds one binding for each CPython it was built for; import picks its own. Imports no
framework. ImportError when two backends are installed over one another: they share this folder.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

DISTRIBUTIONS = ("radix-kernels-cpu", "radix-kernels-cuda", "radix-kernels-rocm")
_FOLDER = Path(__file__).resolve().parent


def _refuse_siblings() -> None:
    installed = _installed()
    if len(installed) > 1:
        raise ImportError(
            f"{' and '.join(installed)} are installed together and overwrite each other. Keep one: "
            f"pip uninstall -y {' '.join(installed)}, then pip install the one you want"
        )


def _installed() -> list[str]:
    """The distributions of DISTRIBUTIONS that are installed where this package is, by the names of
    their `.dist-info` folders: importlib.metadata costs a third of this package's whole import."""
    found = set()
    for entry in os.listdir(_FOLDER.parent):
        if entry.endswith(".dist-info"):
            name, _, _ = entry.partition("-")
            found.add(name.replace("_", "-"))
    return [name for name in DISTRIBUTIONS if name in found]


def _load() -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module("radix_kernels._bind"), ""
    except ImportError as error:
        there = sorted(path.name.split(".")[1] for path in _FOLDER.glob("_bind.*.so"))
        own = str(sys.implementation.cache_tag)
        if any(tag.startswith(f"{own}-") for tag in there):
            return None, f"the native library cannot be loaded: {error}"
        text = f"no native library for {own} in this installation"
        return None, text + (f", which has {', '.join(there)}" if there else "")


def _build_facts() -> dict[str, Any]:
    """What cmake wrote down; {} when nothing was built."""
    built = _FOLDER / "_build.json"
    facts: dict[str, Any] = json.loads(built.read_text()) if built.exists() else {}
    return facts


def _version() -> str:
    """Of the build; of the source tree when nothing was built."""
    facts = _build_facts()
    return str(facts["version"] if facts else (_FOLDER.parents[1] / "VERSION").read_text().strip())


_refuse_siblings()
bind, reason = _load()
if bind is not None and hasattr(bind, "set_bundled_hip"):
    from . import _hip

    bind.set_bundled_hip(_hip.bundled())
version = _version()
backend: str | None = bind.backend if bind else None
abi_version: int | None = bind.abi_version if bind else None
# The chips that a ROCm library has code for (gfx942); empty for the other backends.
targets: tuple[str, ...] = tuple(_build_facts().get("targets", ()))
