"""Marks of tests under several folders."""

from __future__ import annotations

import pytest

from radix_kernels import _loader

needs_cpu_library = pytest.mark.skipif(_loader.backend != "cpu", reason="no native CPU library")
