"""Which folders of csrc/gpu, csrc/sm80, csrc/sm90 and csrc/sm100 may include which: a folder its
own headers and the shared ones, so that a family can be read, built and changed alone."""

from __future__ import annotations

import re

from tests.kernel.gpu_objects import ROOT

CSRC = ROOT / "kernel/csrc"
SHARED = {
    "gpu": {"gpu/device"},
    "sm80": {"gpu/device"},
    "sm100": {"gpu/device"},
    "sm90": {"gpu/device", "sm90/common"},
}
# A grouped product is gemm's persistent kernel with another order of tiles, the experts' pairs are
# sorted as moe_align_block_size sorts them, and their packed weights are those of linear. The
# products of sm_100 are of the family scaled_mm.
FURTHER = {
    "sm90/experts": {"sm90/gemm", "sm90/linear", "gpu/moe"},
    "sm90/linear": {"sm90/gemm"},
    "sm100/scaled_mm": {"sm80/scaled_mm"},
}


def included_folders(top: str) -> dict[str, set[str]]:
    """Folder -> the folders with kernels for GPUs that its files include."""
    found: dict[str, set[str]] = {}
    for path in sorted((CSRC / top).rglob("*")):
        if path.suffix in (".cpp", ".cu", ".cuh", ".h"):
            folder = path.parent.relative_to(CSRC).as_posix()
            includes = re.findall(r'#include "((?:gpu|sm80|sm90|sm100)/\w+)/', path.read_text())
            found.setdefault(folder, set()).update(includes)
    return found


def test_a_family_includes_itself_and_what_is_shared():
    for top, shared in SHARED.items():
        folders = included_folders(top)
        assert len(folders) >= (5 if top in ("gpu", "sm90") else 1), top
        for folder, includes in folders.items():
            allowed = shared | {folder} | FURTHER.get(folder, set())
            assert includes <= allowed, (folder, includes - allowed)


def test_exceptions_are_used():
    for folder, further in FURTHER.items():
        assert further <= included_folders(folder.partition("/")[0])[folder]


def test_what_both_gpus_compile_knows_nothing_of_hopper():
    text = "\n".join(path.read_text() for path in (CSRC / "gpu").rglob("*") if path.is_file())
    assert not re.search(r"sm\d+/", text)
