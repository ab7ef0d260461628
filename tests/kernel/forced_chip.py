"""The kernels of another chip on the GPU that is there: it runs their PTX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import radix_kernels as rk
from radix_kernels import _dispatch


@contextlib.contextmanager
def forced_chip(isa: str, *ops: str) -> Iterator[None]:
    """Within, ops choose the library's kernels for that architecture, and nothing else runs: no
    Triton, no reference. AssertionError where the library has none for one of `ops`, functions of
    the binding."""
    before = rk.get_fallback()
    try:
        with (
            mock.patch.object(_dispatch, "isa", return_value=isa),
            mock.patch.object(_dispatch, "triton_installed", return_value=False),
        ):
            rk.set_fallback("error")
            for op in ops:
                assert _dispatch.describe(op, "cuda") == (f"cuda:{isa}", "native kernel"), op
            yield
    finally:
        rk.set_fallback(before)  # forgets what was chosen, too
