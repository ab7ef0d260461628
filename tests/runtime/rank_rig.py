"""Ranks that are processes on the CPU and work as those of GPUs do: they list candidates of their
parts of the vocabulary, by the reference, and pad and capture their steps."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import radix_kernels
from radix_runtime.engine.model_runner import ModelRunner
from tests.runtime.fake_graphs import FakeRecorder, install

WAYS = "RADIX_TEST_RANKS"  # what worker processes find in their environment


def use(ways: list[str], set_attribute: Callable[[Any, str, Any], None]) -> None:
    """`ways`: of candidates, graphs. For the engines of this process from now on."""

    def lists_candidates(runner: ModelRunner) -> bool:
        radix_kernels.set_fallback("reference")
        return runner.model.vocabulary_shard() is not None

    if "candidates" in ways:
        set_attribute(ModelRunner, "lists_candidates", lists_candidates)
    if "graphs" in ways:
        install(FakeRecorder(), set_attribute)


def prepare_worker() -> None:
    """In a worker process before it begins."""
    use(os.environ[WAYS].split(), setattr)


def use_on_all_ranks(ways: list[str], patch: pytest.MonkeyPatch, folder: Path) -> None:
    """In this process and in the workers that it starts; `folder`: an empty one."""
    if not ways:
        return
    use(ways, patch.setattr)
    # The name that Python imports by itself when it starts.
    (folder / "sitecustomize.py").write_text(
        f"from {__name__} import prepare_worker\nprepare_worker()\n"
    )
    patch.setenv(WAYS, " ".join(ways))
    patch.setattr(sys, "path", [str(folder), *sys.path])
