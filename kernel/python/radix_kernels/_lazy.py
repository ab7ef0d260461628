"""Modules that import a framework: loaded when something of them is first used.

`import radix_kernels` loads neither torch nor Triton. What needs one of them imports it from here,
at the top of its file; nothing else in the package hides an import of the package in a function.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any


class _LazyModule:
    """Stands for the module of that name and imports it when an attribute is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: ModuleType | None = None

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:
            self._module = import_module(self._name)
        return getattr(self._module, attribute)


if TYPE_CHECKING:
    import torch as torch

    from . import reference as reference
    from . import triton as triton
else:
    torch = _LazyModule("torch")
    reference = _LazyModule("radix_kernels.reference")
    triton = _LazyModule("radix_kernels.triton")
