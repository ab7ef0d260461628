"""Fixtures of the runtime's tests."""

from __future__ import annotations

import subprocess

import pytest

from radix_runtime.cli import main
from tests.runtime.command import Run


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command `radix` in this process, which has loaded torch."""
    # It would keep a stream that is captured for one test only.
    monkeypatch.setattr("radix_runtime.cli.flags.setup_logging", lambda *_: None)

    def run_command(*argv: str) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        code = main(argv)
        out, error = capfd.readouterr()
        return subprocess.CompletedProcess(argv, returncode=code, stdout=out, stderr=error)

    return run_command
