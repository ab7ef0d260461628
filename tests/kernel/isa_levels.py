"""The instruction-set levels of the CPU library, and the test files that say what holds at each of
them. As a program it prints the files: tools/gpu_check.sh runs them at the levels that the machines
of CI lack."""

from __future__ import annotations

LEVELS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")
FAMILIES = (
    "norm",
    "layernorm",
    "rope",
    "fused_rope",
    "activation",
    "kv_cache",
    "linear",
    "linear_argmax",
    "linear_quantized",
    "linear_super_blocks",
    "linear_mxfp4",
    "linear_float8",
    "linear_keep_x",
    "attention",
    "attention_int8",
    "attention_merge",
    "moe",
    "moe_groups",
    "packed_experts",
    "packed_experts_terms",
    "packed_heads",
    "decoder",
    "decoder_experts",
    "decoder_latent",
    "sampling",
    "sampling_distribution",
    "sampling_edits",
    "sampling_logprobs",
    "comm",
    "bindings",
)
FILES = tuple(f"tests/kernel/test_{name}.py" for name in FAMILIES)

if __name__ == "__main__":
    print(*FILES, sep="\n")
