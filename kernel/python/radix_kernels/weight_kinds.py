"""The kinds of weights that `pack_weight` knows, and what sets them apart."""

from __future__ import annotations

# Kinds of weights as the library numbers them.
KINDS = {
    "dense": 0, "int8": 1, "int4": 2, "w8a8": 3, "w4a8": 4, "q4_k": 5, "q5_k": 6, "q6_k": 7,
    "mxfp4": 8, "fp8": 9,
}  # fmt: skip
SMALL_CODES = ("int4", "w4a8")
# Kinds in super-blocks of 256 inputs, and the inputs that share a sub-scale.
SUPER_INPUTS = 256
SUPER_GROUPS = {"q4_k": 32, "q5_k": 32, "q6_k": 16}
ONLY_GROUPS = {**SUPER_GROUPS, "mxfp4": 32}  # of the kinds that have one size alone
PAIRED_CODES = (*SMALL_CODES, "q4_k", "mxfp4")
FLOAT8 = "float8_e4m3fn"
BLOCK_OUTPUTS = 128  # that share a scale in FP8 checkpoints


def kind_number(kind: str) -> int:
    """The kind as the library numbers it."""
    return KINDS[kind]


def code_dtype(kind: str) -> str:
    """The dtype of the codes that a quantized kind is packed of."""
    if kind == "fp8":
        return FLOAT8
    return "uint8" if kind in PAIRED_CODES else "int8"
