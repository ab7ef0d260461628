"""What only the executor of AMD's machine code can show (`--device rocm-sim`): faults planted in the
library's code are caught, its collectives agree between processes."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest

from tests.child import IMPORT_PATH
from tests.gcn import library

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def _on_the_executor(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--device") != "rocm-sim":
        pytest.skip("of --device rocm-sim")


@pytest.mark.parametrize("world", [2, 4, 8])
def test_collectives_between_processes(world):
    """Every rank is a process with a GPU of its own: handles, staging memory and flags as on real
    ones."""
    env = library.settings(GCN_DEVICES=str(world), PYTHONPATH=IMPORT_PATH)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.gcn.collectives",
                    str(rank),
                    str(world),
                    f"{folder}/g",
                ],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        said = [process.communicate(timeout=550)[0] for process in ranks]
    assert all(process.returncode == 0 for process in ranks), said
    assert said == ["24 sums, 6 gathered or scattered, 6 norms\n"] * world
