"""Kernels for language-model inference: one set of functions on every platform.

Tensors are torch tensors or any other DLPack type. Importing this package imports no framework.
`radix_kernels.reference` holds the definitions (plain torch), `capabilities()` says what runs
here.
"""

from importlib import import_module
from typing import Any

from . import _loader
from ._exports import LAZY, NAMES

__version__: str = _loader.version
abi_version: int | None = _loader.abi_version

for _name, _module in NAMES.items():
    globals()[_name] = getattr(import_module(f"{__name__}.{_module}"), _name)

__all__ = sorted([*NAMES, *LAZY, "__version__", "abi_version"])


def __getattr__(name: str) -> Any:
    if name in ("reference", "torch_ops"):
        return import_module(f"{__name__}.{name}")
    if name not in LAZY:
        raise AttributeError(f"module 'radix_kernels' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{LAZY[name]}"), name)
