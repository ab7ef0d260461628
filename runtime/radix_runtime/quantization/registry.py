"""Quantization formats by name (`--quantization`); None is the compute type itself."""

from __future__ import annotations

from .base import LinearMethod, linear_methods
from .dense import DenseMethod


def create_linear_method(name: str | None) -> LinearMethod:
    """Raises ConfigError for a format that is not there."""
    return DenseMethod() if name is None else linear_methods.get(name)()
