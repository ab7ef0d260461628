"""The mark of tests that run on the executor."""

from __future__ import annotations

import pytest

from tests.gcn import library

needs_executor = pytest.mark.skipif(
    not (library.compiler() and library.objdump()), reason="needs g++ and LLVM's disassembler"
)
