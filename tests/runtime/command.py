"""Runs the command `radix` as a process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from tests.runtime.server_process import environment

Run = Callable[..., subprocess.CompletedProcess[str]]

# A small KV cache and one thread: enough for the embedded model.
SMALL = ("--max-total-tokens", "4096", "--num-threads", "1")


def radix(*argv: str, stdin: str = "", limit: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "radix_runtime.cli", *argv],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=limit,
        env=environment("/tmp"),
        check=False,
    )
