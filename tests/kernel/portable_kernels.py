"""The kernels of csrc/gpu by their sources, and what is true of all their instances.

A kernel's name is as `gpu_objects.short_names` spells it, `rope_kernel<true, 8, bf16>`: a base and
template arguments.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from tests.kernel.gpu_objects import ROOT

PACK = {"bf16": 8, "f16": 8, "float": 4}  # elements in 16 bytes
_KERNEL = re.compile(
    r"__global__\s+void\s+(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\("
)

# A block a row that ends a draw: what it calls for flat rows keeps its state on the stack.
FINISHERS = {"finish_kernel", "candidates_kernel", "merge_kernel"}
# What their waves reduce goes through no LDS but that of the block's sum.
REDUCERS = {
    "register_kernel", "memory_kernel", "row_kernel", "largest_kernel", "norm_kernel",
    "long_norm_kernel", "group_kernel", "fused_kernel", "route_kernel", "store_latent_fp8_kernel",
}  # fmt: skip
# Blocks of at most 512 threads, so that a thread may have 128 registers. Of the collectives: one
# block an SM, which spins and sends.
SMALL_BLOCKS = {
    "store_kernel", "rope_kernel", "fused_kernel", "gated_kernel", "gated_even_kernel",
    "register_kernel", "memory_kernel", "route_kernel",
    "one_shot_kernel", "two_shot_kernel", "reduce_scatter_kernel", "all_gather_kernel",
}  # fmt: skip
# Where the template argument is that says how many elements an access moves.
_ACCESS_ARGUMENT = {"rope_kernel": 1, "fused_kernel": 3, "gated_kernel": 1, "memory_kernel": 1}
# These always move 16 bytes.
_ALWAYS_WIDE = {"register_kernel", "gated_even_kernel"}
WIDE_BASES = {*_ACCESS_ARGUMENT, *_ALWAYS_WIDE, "store_kernel"}


def declared() -> set[str]:
    """The base names of all kernels that csrc/gpu defines."""
    folder = ROOT / "kernel/csrc/gpu"
    sources = [*folder.rglob("*.cu"), *folder.rglob("*.h")]
    return {name for path in sources for name in _KERNEL.findall(path.read_text())}


def base_of(name: str) -> str:
    return name.partition("<")[0]


def arguments_of(name: str) -> list[str]:
    """A kernel's template arguments; those of a nested template are one."""
    inner = name.partition("<")[2].removesuffix(">").strip()
    return re.split(r", (?![^<]*>)", inner)


def moves_16_bytes(name: str) -> bool:
    """Whether it loads and stores 16 bytes at a time: where shape and addresses allow."""
    base = base_of(name)
    if base == "store_kernel":
        return name == "store_kernel<Copied<Wide> >"
    if base in _ACCESS_ARGUMENT:
        return int(arguments_of(name)[_ACCESS_ARGUMENT[base]]) > 1
    return base in _ALWAYS_WIDE


def reduces(name: str) -> bool:
    """Whether lanes of a wave share what it computes; a router of few experts has a lane a row."""
    base = base_of(name)
    return base in REDUCERS and (base != "route_kernel" or arguments_of(name)[1] != "1")


def rounds_to_fp8(name: str) -> bool:
    """Whether it makes FP8 of the chip's format, several elements at a time."""
    base = base_of(name)
    arguments = arguments_of(name)
    if base == "fused_kernel":
        return arguments[-1] == "true" and int(arguments[3]) > 1
    if base == "store_kernel":
        return "Quantized" in name and not re.search(r", 1>", name)
    quantizers = {"row_kernel", "group_kernel", "tensor_kernel", "norm_kernel", "long_norm_kernel"}
    return base in quantizers and "NativeE4m3" in name


def missing_types(names: Iterable[str]) -> list[str]:
    """What is instantiated for one element type and forgotten for another: each instance for bf16
    has its twin for fp16, and a kernel that has these has some for fp32."""
    names = set(names)
    found = []
    types: dict[str, set[str]] = defaultdict(set)
    for name in names:
        words = set(re.findall(r"\w+", name.partition("<")[2]))
        types[base_of(name)] |= words & set(PACK)
        for ours, other in (("bf16", "f16"), ("f16", "bf16")):
            twin = re.sub(rf"\b{ours}\b", other, name)
            if twin not in names:
                found.append(twin)
    for base, seen in types.items():
        if "f16" in seen and "float" not in seen:
            found.append(f"{base}<float>")
    return found
