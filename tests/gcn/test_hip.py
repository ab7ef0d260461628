"""The stand-in refuses what HIP refuses."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.child import IMPORT_PATH
from tests.gcn import assembly, library
from tests.gcn.assembly import Refused, check, run
from tests.gcn.marks import needs_executor

pytestmark = needs_executor

INVALID_VALUE = 1
NO_DEVICE = 100
INVALID_DEVICE = 101
INVALID_CONTEXT = 201
INVALID_HANDLE = 400
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713
CAPTURE_UNSUPPORTED = 900
CAPTURE_INVALIDATED = 901
CAPTURE_IMPLICIT = 906
UNCACHED = 3  # hipDeviceMallocUncached
LAZY_PEER_ACCESS = 1  # hipIpcMemLazyEnablePeerAccess, since HIP 6

COPY_LANE = "global_store_dword v63, v0, s[4:5]"


@pytest.fixture
def hip() -> ctypes.CDLL:
    return library.load()


@pytest.fixture
def memory(hip):
    found = ctypes.c_void_p()
    check(hip, hip.hipExtMallocWithFlags(ctypes.byref(found), 64, UNCACHED))
    yield found
    hip.hipFree(found)


@pytest.fixture
def stream(hip):
    found = ctypes.c_void_p()
    check(hip, hip.hipStreamCreateWithFlags(ctypes.byref(found), 1))
    yield found
    hip.hipStreamDestroy(found)


def test_memory_handles(hip, memory):
    handle = (ctypes.c_char * 64)()
    opened = ctypes.c_void_p()

    class Handle(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_char * 64)]

    def reopen(data: bytes, flags: int) -> int:
        return int(
            hip.hipIpcOpenMemHandle(ctypes.byref(opened), Handle.from_buffer_copy(data), flags)
        )

    check(hip, hip.hipIpcGetMemHandle(handle, memory))
    data = bytes(bytearray(handle))
    assert reopen(data, 0) == INVALID_VALUE
    assert reopen(data, LAZY_PEER_ACCESS) == INVALID_CONTEXT  # it is this process's own
    assert reopen(bytes(64), LAZY_PEER_ACCESS) == INVALID_VALUE  # another runtime's
    inside = ctypes.c_void_p(memory.value + 8)
    assert hip.hipIpcGetMemHandle(handle, inside) == INVALID_VALUE
    assert hip.hipIpcCloseMemHandle(memory) == INVALID_VALUE


def test_memory_that_is_not_hip_s(hip, memory):
    here = (ctypes.c_char * 4096)()
    other = ctypes.c_void_p()
    assert hip.hipFree(ctypes.c_void_p(memory.value + 16)) == INVALID_VALUE
    assert hip.hipMemset(memory, 0, 65) == INVALID_VALUE
    assert hip.hipHostGetDevicePointer(ctypes.byref(other), here, 0) == INVALID_VALUE
    assert hip.hipHostRegister(here, 4096, 2) == 0
    assert hip.hipHostRegister(here, 4096, 2) == ALREADY_REGISTERED
    assert hip.hipHostGetDevicePointer(ctypes.byref(other), here, 0) == 0
    assert hip.hipHostUnregister(here) == 0
    assert hip.hipHostUnregister(here) == NOT_REGISTERED
    assert hip.hipSetDevice(99) == INVALID_DEVICE


def test_a_stream_that_nobody_made():
    with pytest.raises(Refused, match="invalid resource handle"):
        run(COPY_LANE, np.zeros(1, np.uint32), np.zeros(64, np.uint32), stream=77)


def test_capture_records_and_a_graph_runs(hip, stream):
    out = np.zeros(64, np.uint32)
    graph = ctypes.c_void_p()
    ready = ctypes.c_void_p()
    check(hip, hip.hipStreamBeginCapture(stream, 0))
    run(COPY_LANE, np.zeros(1, np.uint32), out, stream=stream.value)
    check(hip, hip.hipStreamEndCapture(stream, ctypes.byref(graph)))
    assert not out.any()
    check(hip, hip.hipGraphInstantiateWithFlags(ctypes.byref(ready), graph, ctypes.c_ulonglong(0)))
    hip.gcn_map(out.ctypes.data, out.nbytes)
    check(hip, hip.hipGraphLaunch(ready, stream))
    hip.gcn_unmap(out.ctypes.data, out.nbytes)
    assert np.array_equal(out, np.arange(64))
    assert hip.hipGraphLaunch(ready, stream) == 719  # the array is no longer there
    hip.hipGraphExecDestroy(ready)
    hip.hipGraphDestroy(graph)


@pytest.mark.parametrize(
    "call",
    ["hipDeviceSynchronize", "hipMalloc", "hipFree", "hipMemset", "hipStreamSynchronize"],
)
def test_what_a_capture_does_not_permit(hip, stream, memory, call):
    pointer = ctypes.c_void_p()
    calls = {
        "hipDeviceSynchronize": (),
        "hipMalloc": (ctypes.byref(pointer), 8),
        "hipFree": (memory,),
        "hipMemset": (memory, 0, 8),
        "hipStreamSynchronize": (stream,),
    }
    graph = ctypes.c_void_p()
    check(hip, hip.hipStreamBeginCapture(stream, 0))
    assert getattr(hip, call)(*calls[call]) == CAPTURE_UNSUPPORTED
    assert hip.hipStreamEndCapture(stream, ctypes.byref(graph)) == CAPTURE_INVALIDATED


def test_the_legacy_stream_ends_a_capture(hip, stream):
    graph = ctypes.c_void_p()
    check(hip, hip.hipStreamBeginCapture(stream, 0))
    with pytest.raises(Refused, match="legacy stream"):
        run(COPY_LANE, np.zeros(1, np.uint32), np.zeros(64, np.uint32))
    assert hip.hipStreamEndCapture(stream, ctypes.byref(graph)) == CAPTURE_INVALIDATED


def test_no_gpu():
    code = (
        "import ctypes, os; hip = ctypes.CDLL(os.environ['RADIX_LIBHIP']); n = ctypes.c_int();"
        "print(hip.hipGetDeviceCount(ctypes.byref(n)), n.value, hip.hipSetDevice(0),"
        " hip.hipMalloc(ctypes.byref(ctypes.c_void_p()), 8))"
    )
    env = library.environment(GCN_DEVICES="0", PYTHONPATH=IMPORT_PATH)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(NO_DEVICE), "0", str(NO_DEVICE), str(NO_DEVICE)]


def test_unknown_opcodes_are_reported():
    with pytest.raises(Refused):
        run("v_cos_f16_e32 v1, v2", np.zeros(1, np.uint32), np.zeros(1, np.uint32))
    assert any("v_cos_f16" in text for text in library.report()["unknown"])
    assert assembly.LANES == 64


HEADERS = [
    *map(Path, ("/usr/include", "/opt/rocm/include")),
    *Path(sys.prefix).glob("lib/python3*/site-packages/triton/backends/amd/include"),
]


@pytest.mark.parametrize("headers", [h for h in HEADERS if (h / "hip").is_dir()], ids=str)
def test_the_library_s_numbers_are_those_of_the_headers(headers, tmp_path):
    """What it passes to HIP or takes from it; the stand-in has the same."""
    source = tmp_path / "constants.cpp"
    source.write_text('#include "rocm/hip_check.h"\n')
    compiler = library.compiler() or "c++"
    command = [compiler, "-std=c++17", "-fsyntax-only", "-w", "-D__HIP_PLATFORM_AMD__"]
    command += ["-D__HIP_PLATFORM_HCC__", f"-I{library.ROOT / 'kernel/csrc'}"]
    subprocess.run([*command, f"-isystem{headers}", source], check=True)


def test_headers_of_both_kinds_are_at_hand():
    """Where CI runs: one of HIP 5 and one of HIP 7."""
    if "hip" not in os.environ.get("REQUIRE", "").split(","):
        pytest.skip("REQUIRE does not name hip")
    assert len([h for h in HEADERS if (h / "hip").is_dir()]) >= 2
