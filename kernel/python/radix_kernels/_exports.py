"""What the package exports, by name: the ops of the table and what goes with them.

`__init__` builds the package from this and tools/op_tables.py its stub, `__init__.pyi`.
"""

from __future__ import annotations

from ._ops import OPS

# Besides the ops: types, packing, settings.
_OTHERS = {
    "ClampedSwiGlu": "gating",
    "Decoder": "decoder",
    "LogitEdits": "logit_edits",
    "PackedExperts": "packed_experts",
    "PackedHeads": "packed_heads",
    "PackedWeight": "packed_weight",
    "PersistentDecoder": "persistent_decoder",
    "PersistentLayer": "persistent_decoder",
    "capabilities": "capabilities",
    "dequantize_gguf": "gguf_blocks",
    "fp8_format": "fp8",
    "get_fallback": "_dispatch",
    "get_num_threads": "threads",
    "native_fp8": "fp8",
    "pack_experts": "packed_experts",
    "pack_merged": "merged_weight",
    "pack_weight": "packed_weight",
    "rope_cos_sin_cache": "rope",
    "set_fallback": "_dispatch",
    "set_num_threads": "threads",
    "unpack_awq": "formats",
    "unpack_gguf": "gguf_blocks",
    "unpack_gptq": "formats",
    "unpack_weight": "unpacked_weight",
    "weight_kernel": "capabilities",
}

# Public name -> the module that defines it.
NAMES = {op.name: op.module for op in OPS} | _OTHERS

# The same, of modules that are loaded on first use.
LAZY = {"GpuCommunicator": "comm", "ShmCommunicator": "comm"}
