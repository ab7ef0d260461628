"""A launch on a GPU asks the driver nothing that it has been told before."""

from __future__ import annotations

from pathlib import Path

from tests.kernel import gpu_objects


def test_the_driver_is_asked_once(tmp_path: Path) -> None:
    assert gpu_objects.run_emulated("launches", tmp_path) == "ok\n"
