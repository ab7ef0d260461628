"""How a test starts a process that imports just what the test itself imports: the installed
packages or the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

IMPORT_PATH = os.pathsep.join(filter(None, sys.path))


def run_at_level(
    level: str, *command: str, path: str = IMPORT_PATH, timeout: float = 590
) -> subprocess.CompletedProcess[str]:
    """Python with this command at an instruction-set level of the CPU library, in the repository's
    root."""
    env = {**os.environ, "RADIX_CPU_ISA": level, "PYTHONPATH": path}
    command = (sys.executable, *command)
    root = Path(__file__).resolve().parents[1]
    return subprocess.run(
        command, env=env, cwd=root, capture_output=True, text=True, timeout=timeout
    )
