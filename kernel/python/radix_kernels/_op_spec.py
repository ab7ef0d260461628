"""What an entry of the table of ops says: an op, its kernels, the libraries that have them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Library:
    """A native library that has a kernel.

    backend: `cpu`, `cuda` or `rocm`. archs: the only architectures that the kernel is for, as
    `capabilities()["isa"]` names them; empty: every one of the library's. refuses: dtypes of the op
    that the kernel does not take there.
    """

    backend: str
    archs: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """A function or class of the binding, and what else runs its calls.

    family: its C++ sources (`include/radix_kernels/<family>.h`, `csrc/api/<family>.cpp`,
    `csrc/bindings/<family>.cpp`). triton: `radix_kernels.triton` has a function of this name for
    GPUs, which does not take the dtypes in triton_refuses; without libraries the kernel is Triton's
    alone. elsewhere: the kernel that takes the same calls on architectures that this one is not
    for; '': none. torch: on a GPU torch is the implementation of choice, not a fallback: dense
    products there are the vendor's BLAS. Where there is none of these, the reference runs.
    """

    name: str
    family: str
    libraries: tuple[Library, ...]
    triton: bool = False
    triton_refuses: tuple[str, ...] = ()
    elsewhere: str = ""
    torch: bool = False

    def library(self, backend: str | None) -> Library | None:
        """The entry of that backend, None where its library lacks the kernel."""
        return next((entry for entry in self.libraries if entry.backend == backend), None)


@dataclass(frozen=True)
class OpSpec:
    """A public op, `radix_kernels.<name>`.

    module: the module of the package that defines it. dtypes: what it takes everywhere;
    more_dtypes: what it takes besides with the library of a backend (keys and values with scales,
    AMD's FP8). kernels: those it calls; where two are of one backend, `capabilities()` describes
    the first. note: what `capabilities()` says of a native kernel on a GPU that does not serve
    every call. doc: the page in docs/kernels; test: the file in tests/kernel; bench: the family of
    `python -m bench.kernels`, '' where it has no case of its own.
    """

    name: str
    module: str
    dtypes: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    doc: str
    test: str
    bench: str = ""
    more_dtypes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    note: str = ""

    def kernel(self, backend: str) -> Kernel:
        """The kernel that a library of that backend would run."""
        with_backend = (kernel for kernel in self.kernels if kernel.library(backend) is not None)
        return next(with_backend, self.kernels[-1])
