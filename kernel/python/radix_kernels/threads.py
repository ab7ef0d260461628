"""The size of the CPU thread pool, which belongs to the native library."""

from __future__ import annotations

from . import _loader
from ._lazy import torch


def set_num_threads(n: int, *, pin: bool = False) -> None:
    """Use n threads in CPU ops, the caller included; pin binds each worker to a CPU of its own.

    n CPUs are taken that no other process has bound its workers to this way, the first for the
    caller, who stays free to move; where there are not so many, nobody is bound and the system
    places all threads. Results do not depend on n. Without a native library n is torch's number of
    threads and pin raises NotImplementedError. Errors: ValueError (n outside of 1 .. 1024).
    """
    if not 1 <= n <= 1024:
        raise ValueError(f"set_num_threads: n is {n}, expected 1 to 1024")
    native = getattr(_loader.bind, "set_num_threads", None)
    if native is not None:
        native(n, pin)
        return
    if pin:
        raise NotImplementedError("set_num_threads: pin needs the native CPU library")
    torch.set_num_threads(n)


def get_num_threads() -> int:
    """The number of threads that CPU ops may use."""
    native = getattr(_loader.bind, "get_num_threads", None)
    if native is not None:
        return int(native())
    return torch.get_num_threads()
