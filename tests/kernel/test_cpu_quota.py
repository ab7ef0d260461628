"""How many CPUs' worth of time a process has under the limits of its cgroups, of either version;
compiled by itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAIN = """
#include <cstdio>
#include "cpu/cpu_quota.h"
int main(int, char** argv) { std::printf("%d", radix::cpu::cpu_quota(argv[1])); }
"""
NONE = 2**31 - 1
CGROUP = "proc/self/cgroup"
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/cpu"

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cpu_quota")
    (folder / "main.cpp").write_text(MAIN)
    sources = [str(folder / "main.cpp"), f"{ROOT}/kernel/csrc/cpu/cpu_quota.cpp"]
    command = [
        "c++",
        "-std=c++17",
        "-Wall",
        "-Wextra",
        f"-I{ROOT}/kernel/csrc",
        *sources,
        "-o",
        str(folder / "quota"),
    ]
    subprocess.run(command, check=True, timeout=240)
    return folder / "quota"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, NONE, id="no cgroups"),
        pytest.param({CGROUP: "0::/a\n", f"{V2}/a/cpu.max": "max 100000\n"}, NONE, id="no limit"),
        pytest.param(
            {CGROUP: "0::/\n", f"{V2}/cpu.max": "350000 100000\n"}, 4, id="a container's own mount"
        ),
        pytest.param(
            {CGROUP: "0::/../../x\n", f"{V2}/cpu.max": "200000 100000\n"},
            2,
            id="a path of the host's",
        ),
        pytest.param(
            {
                CGROUP: "0::/a/b/c\n",
                f"{V2}/a/cpu.max": "150000 50000\n",
                f"{V2}/a/b/cpu.max": "800000 100000\n",
                f"{V2}/a/b/c/cpu.max": "max 100000\n",
                f"{V2}/d/cpu.max": "100000 100000\n",
            },
            3,
            id="the tightest of those above",
        ),
        pytest.param(
            {
                CGROUP: "5:cpuset:/x\n4:cpu,cpuacct:/a/b\n1:name=systemd:/y\n0::/z\n",
                f"{V1}/a/cpu.cfs_quota_us": "250000\n",
                f"{V1}/a/cpu.cfs_period_us": "100000\n",
                f"{V1}/a/b/cpu.cfs_quota_us": "-1\n",
                f"{V1}/a/b/cpu.cfs_period_us": "100000\n",
                f"{V1}/x/cpu.cfs_quota_us": "100000\n",
                f"{V1}/x/cpu.cfs_period_us": "100000\n",
            },
            3,
            id="version 1",
        ),
        pytest.param(
            {
                CGROUP: "4:cpu:/docker/abc\n",
                f"{V1}/cpu.cfs_quota_us": "50000\n",
                f"{V1}/cpu.cfs_period_us": "100000\n",
            },
            1,
            id="version 1 in a container",
        ),
        pytest.param(
            {CGROUP: "4:cpu:/a\n", f"{V1}/a/cpu.cfs_quota_us": "50000\n"},
            NONE,
            id="a period is missing",
        ),
        pytest.param({CGROUP: "4:cpuset:/a\n", f"{V2}/cpu.max": "0 0\n"}, NONE, id="nonsense"),
    ],
)
def test_the_tightest_quota_counts(
    files: dict[str, str], expected: int, program: Path, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [str(program), str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) == expected
