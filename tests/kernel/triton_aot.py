"""Compile the Triton kernels for chips that are not here; print one JSON line for each.

`python -m tests.kernel.triton_aot TARGET...` with targets such as gfx942 or sm_90. A process of its
own, because Triton fixes at import whether kernels are compiled or interpreted.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radix_kernels.triton.attention import choose_tiles
from radix_kernels.triton.attention_kernel import attend, combine

POINTERS = {
    "q": "Q",
    "k_cache": "KV",
    "v_cache": "KV",
    "page_table": "i32",
    "kv_lens": "i32",
    "cu_seqlens": "i32",
    "sinks": "fp32",
    "q_scale": "fp32",
    "k_scale": "fp32",
    "v_scale": "fp32",
    "out": "T",
    "lse": "fp32",
    "part_out": "fp32",
    "part_lse": "fp32",
}
# (dtype, itemsize, head dim, query heads for each KV head, page size)
SHAPES = [
    ("bf16", 2, 128, 8, 16),
    ("fp16", 2, 64, 2, 1),
    ("bf16", 2, 256, 4, 64),
    ("fp32", 4, 64, 2, 16),
    ("fp32", 4, 128, 4, 16),
]
# FP8 keys and values, queries too, AMD's format, contiguous keys, and values of another size than
# keys.
KV8 = {"KV_BYTES": True}
ALL8 = {"Q_BYTES": True, "KV_BYTES": True}
FORMS: list[tuple[str, tuple[str, int, int, int, int], bool, dict[str, Any]]] = [
    ("kv8 decode", ("bf16", 2, 128, 8, 16), True, KV8),
    ("kv8 prefill", ("bf16", 2, 128, 8, 16), False, KV8),
    ("kv8 fnuz d256 decode", ("fp16", 2, 256, 4, 64), True, KV8 | {"FNUZ": True}),
    ("all8 fnuz varlen", ("bf16", 2, 128, 4, 0), False, ALL8 | {"FNUZ": True}),
    ("varlen 192 and 128", ("bf16", 2, 192, 1, 0), False, {"V_DIM": 128, "V_PAD": 128}),
]


def target_of(name: str) -> GPUTarget:
    if name.startswith("gfx"):
        return GPUTarget(backend="hip", arch=name, warp_size=64)
    return GPUTarget(backend="cuda", arch=int(name.removeprefix("sm_")), warp_size=32)


def compile_one(
    kernel: Any,
    constants: dict[str, Any],
    dtype: str,
    target: GPUTarget,
    ones: bool = False,
    **options,
):
    """Pointers and row strides are 16-byte aligned, as torch's are.

    ones: every other integer is 1, of which a launch makes a constant unless the kernel says not
    to.
    """
    signature = {}
    attributes = {}
    types = {"T": dtype, "Q": "u8" if constants.get("Q_BYTES") else dtype}
    types["KV"] = "u8" if constants.get("KV_BYTES") else dtype
    if ones:
        fixed = {p.name for p in kernel.params if p.do_not_specialize} | {
            *POINTERS,
            "scale",
            "softcap",
        }
        constants = {name: 1 for name in kernel.arg_names if name not in fixed} | constants
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in POINTERS:
            signature[name] = "*" + types.get(POINTERS[name], POINTERS[name])
            attributes[index,] = [["tt.divisibility", 16]]
        elif name in ("scale", "softcap"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if name not in ("rows", "window_left"):
                attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=options)


def attend_one(
    dtype: str,
    itemsize: int,
    dim: int,
    group: int,
    page: int,
    decode: bool,
    target: GPUTarget,
    form: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    tiles = choose_tiles(dim, group, itemsize, decode, target.backend == "hip")
    constants = {
        **sizes(dim, group),
        "DIM": dim,
        "DIM_PAD": triton.next_power_of_2(dim),
        "GROUP": group,
        "PAGE_SIZE": page,
        "Q_BYTES": False,
        "KV_BYTES": False,
        "FNUZ": False,
        "PER_HEAD": True,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "SPLIT": 512 if decode else 0,
        "SPLITS": 8 if decode else 1,
        "CAUSAL": True,
        "WINDOW": not decode,
        "SOFTCAP": not decode,
        "DIES": 1 if decode or target.backend != "hip" else 8,
        **(form or {}),
    }
    unused = [] if decode else ["part_out", "part_lse"]
    unused += [] if page else ["page_table"]
    unused += [] if constants["Q_BYTES"] else ["q_scale"]
    unused += [] if constants["KV_BYTES"] else ["k_scale", "v_scale"]
    constants |= dict.fromkeys(unused)
    options |= {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return compile_one(attend, constants, dtype, target, **options)


def sizes(dim: int, group: int) -> dict[str, Any]:
    return {"HEADS": group * 2, "V_DIM": dim, "V_PAD": dim, "SINKS": True, "WITH_LSE": True}


def variants(target: GPUTarget) -> Iterator[tuple[str, Any]]:
    for shape in SHAPES:
        dtype, _, dim, group, _ = shape
        for decode in (False, True):
            name = f"attend {dtype} d{dim} {'decode' if decode else 'prefill'}"
            yield name, attend_one(*shape, decode, target)
        constants = {**sizes(dim, group), "SPLITS": 8, "SPLITS_PAD": 8}
        yield f"combine {dtype} d{dim}", compile_one(combine, constants, dtype, target, num_warps=1)
    for name, shape, decode, form in FORMS:
        yield f"attend {name}", attend_one(*shape, decode, target, form)
    yield "attend bf16 ones", attend_one("bf16", 2, 64, 2, 16, False, target, ones=True)
    yield (
        "combine bf16 ones",
        compile_one(combine, constants, "bf16", target, ones=True, num_warps=1),
    )


def _number(key: str, assembly: str) -> int:
    """The value of a field of AMD's metadata."""
    match = re.search(rf"\.{key}:\s*(\d+)", assembly)
    assert match, f"the assembly has no {key}"
    return int(match[1])


def _loop_mma(assembly: str) -> int:
    """Matrix instructions of the loop that has the most of them."""
    labels: dict[str, int] = {}
    most = 0
    seen = 0
    for line in assembly.splitlines():
        text = line.partition(";")[0].strip()
        if text.endswith(":"):
            labels[text[:-1]] = seen
        seen += text.startswith("v_mfma_")
        branch = re.fullmatch(r"s_c?branch\w*\s+(\S+)", text)
        if branch and branch[1] in labels:
            most = max(most, seen - labels[branch[1]])
    return most


def facts(compiled: Any) -> dict[str, Any]:
    """Shared memory, and what the assembly says of registers, spills and matrix instructions."""
    found: dict[str, Any] = {"shared": compiled.metadata.shared}
    amd = compiled.asm.get("amdgcn")
    if amd is None:
        found["mma"] = len(re.findall(r"\b(?:mma|wgmma)\S*\.sync", compiled.asm["ptx"]))
        return found
    for key in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        found[key] = _number(key, amd)
    found["vgpr_count"] = _number("vgpr_count", amd)
    found["mma"] = len(re.findall(r"\bv_mfma_", amd))
    found["loop_mma"] = _loop_mma(amd)
    found["wide_loads"] = len(re.findall(r"\b(?:global|buffer)_load_dwordx4", amd))
    found["paired_loads"] = len(re.findall(r"\b(?:global|buffer)_load_dwordx2", amd))
    return found


if __name__ == "__main__":
    for target_name in sys.argv[1:]:
        for kernel_name, compiled in variants(target_of(target_name)):
            line = {"target": target_name, "kernel": kernel_name, **facts(compiled)}
            print(json.dumps(line), flush=True)
