"""Kernels written in assembly, for tests of the executor: assembled, loaded and launched by HIP's
module functions."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gcn import library
from tests.gcn.listing import address_of, listing

LANES = 64
MACHINES = {"gfx90a": 0x3F, "gfx942": 0x4C, "gfx950": 0x4F}  # EF_AMDGPU_MACH
_FLAGS = 48  # of the ELF header
_TEMPLATE = """
.amdgcn_target "amdgcn-amd-amdhsa--{target}"
.amdhsa_code_object_version 5
.text
.globl test
.p2align 8
.type test,@function
test:
{body}
  s_endpgm
.section .rodata
.p2align 6
.amdhsa_kernel test
  .amdhsa_group_segment_fixed_size {lds}
  .amdhsa_private_segment_fixed_size {scratch}
  .amdhsa_kernarg_size 16
  .amdhsa_user_sgpr_dispatch_ptr {packet}
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_user_sgpr_count {pointers}
  .amdhsa_system_vgpr_workitem_id 2
  .amdhsa_next_free_vgpr 128
  .amdhsa_next_free_sgpr 64
  .amdhsa_accum_offset 64
.end_amdhsa_kernel
.amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.kernels:
  - .name: test
    .symbol: test.kd
    .kernarg_segment_size: 16
    .kernarg_segment_align: 8
    .group_segment_fixed_size: {lds}
    .private_segment_fixed_size: {scratch}
    .wavefront_size: 64
    .sgpr_count: 64
    .vgpr_count: 128
    .max_flat_workgroup_size: 1024
    .args:
      - {{.offset: 0, .size: 8, .value_kind: global_buffer, .address_space: global}}
      - {{.offset: 8, .size: 8, .value_kind: global_buffer, .address_space: global}}
...
.end_amdgpu_metadata
"""
# s[4:5] is the output, s[6:7] the input; v0 the thread of the block, v63 four times it.
_BEGIN = """
  s_load_dwordx4 s[4:7], s[0:1], 0x0
  v_and_b32_e32 v0, 0x3ff, v0
  v_lshlrev_b32_e32 v63, 2, v0
  s_waitcnt lgkmcnt(0)
"""
# With the dispatch packet asked for: s[8:9].
_TAKE_PACKET = """
  s_mov_b64 s[8:9], s[0:1]
  s_mov_b64 s[0:1], s[2:3]
"""
_PLACEHOLDER = "  s_nop 7"


class Refused(Exception):
    """A launch that ended with an error; the text says why."""


def compiler() -> str:
    """A clang that assembles for AMD, or the test is skipped."""
    for name in ("clang-21", "clang-20", "clang-19", "amdclang"):
        if found := shutil.which(name):
            return found
    pytest.skip("no clang with the AMDGPU target is installed")


def assemble(
    body: str, *, target: str = "", lds: int = 0, scratch: int = 0, packet: bool = False
) -> bytes:
    """A code object with the kernel `test`, for the stand-in's GPU or another. gfx950's is made by
    an assembler that need not know it: what gfx942 has not, the body has as words. packet: the
    body finds the dispatch packet's address in s[8:9]."""
    target = target or os.environ.get("GCN_TARGET", "gfx942")
    known = "gfx942" if target == "gfx950" else target
    image = bytearray(_assemble(body, known, lds, scratch, packet))
    image[_FLAGS] = MACHINES[target]
    return bytes(image)


@functools.cache
def _assemble(body: str, target: str, lds: int, scratch: int, packet: bool) -> bytes:
    text = _TEMPLATE.format(
        body=(_TAKE_PACKET if packet else "") + _BEGIN + body,
        target=target,
        lds=lds,
        scratch=scratch,
        packet=int(packet),
        pointers=4 if packet else 2,
    )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.s")
        out = Path(folder, "kernel.co")
        source.write_text(text)
        command = [compiler(), "-target", "amdgcn-amd-amdhsa", f"-mcpu={target}"]
        subprocess.run([*command, str(source), "-o", str(out)], check=True)
        return out.read_bytes()


def check(hip: ctypes.CDLL, error: int) -> None:
    """Raises Refused for everything but hipSuccess."""
    if error:
        raise Refused(hip.hipGetErrorString(error).decode())


def run(
    body: str,
    given: np.ndarray,
    out: np.ndarray,
    *,
    blocks: int = 1,
    threads: int = LANES,
    lds: int = 0,
    scratch: int = 0,
    packet: bool = False,
    stream: int | None = None,
    assembled: bool = True,
) -> np.ndarray:
    """Runs the body on arrays that it may touch to their ends, and returns `out`.

    assembled: False for instructions that no assembler here knows: the executor gets their text.
    """
    hip = library.load()
    module = ctypes.c_void_p()
    function = ctypes.c_void_p()
    image = assemble(body if assembled else _PLACEHOLDER, lds=lds, scratch=scratch, packet=packet)
    if not assembled:
        text = listing(f"{_BEGIN}{body}\n  s_endpgm", address_of(image, "test"))
        hip.gcn_listing(image, ctypes.c_size_t(len(image)), text.encode())
    check(hip, hip.hipModuleLoadData(ctypes.byref(module), image))
    check(hip, hip.hipModuleGetFunction(ctypes.byref(function), module, b"test"))
    addresses = [ctypes.c_void_p(out.ctypes.data), ctypes.c_void_p(given.ctypes.data)]
    values = (ctypes.c_void_p * 2)(*(ctypes.addressof(a) for a in addresses))
    for array in (out, given):
        hip.gcn_map(array.ctypes.data, array.nbytes)
    try:
        grid = (blocks, 1, 1, threads, 1, 1)
        error = hip.hipModuleLaunchKernel(function, *grid, 0, ctypes.c_void_p(stream), values, None)
        check(hip, error)
    finally:
        for array in (out, given):
            hip.gcn_unmap(array.ctypes.data, array.nbytes)
    return out


def lanes(
    body: str,
    *words: Sequence[int] | np.ndarray,
    results: int = 1,
    first: int = 10,
    **options: Any,
) -> np.ndarray:
    """What a wave computes: v1, v2, ... hold the given 32-bit words, `first` and on the results.

    options: of `run`. Returns [results, 64] uint32.
    """
    columns = [np.asarray(w).astype(np.uint32) for w in words]
    given = np.concatenate(columns) if columns else np.zeros(LANES, np.uint32)
    loads = "".join(
        f"  global_load_dword v{i + 1}, v63, s[6:7] offset:{4 * LANES * i}\n"
        for i in range(len(columns))
    )
    stores = "".join(
        f"  global_store_dword v63, v{first + i}, s[4:5] offset:{4 * LANES * i}\n"
        for i in range(results)
    )
    out = np.zeros((results, LANES), np.uint32)
    return run(f"{loads}  s_waitcnt vmcnt(0)\n{body}\n{stores}", given, out, **options)
