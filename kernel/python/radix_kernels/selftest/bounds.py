"""The largest error of an element that an op may show, by dtype (docs/numerics.md)."""

from __future__ import annotations

# Computed in float32 and rounded once.
ROUNDED_ONCE = {"float32": 4e-6, "float16": 5.2e-4, "bfloat16": 4.1e-3}
SUM = ROUNDED_ONCE | {"float32": 1e-4}
# Products by the vendor's BLAS may round partial sums.
LINEAR = {"float32": 1e-4, "float16": 1.5e-3, "bfloat16": 1.2e-2}
# With roundings between the product and what follows.
GATED = {"float32": 1e-4, "float16": 6e-3, "bfloat16": 4e-2}
ATTENTION = {"float32": 9e-5, "float16": 4e-3, "bfloat16": 3e-2, "int8": 9e-5}
ATTENTION_FP8 = 0.6
LSE = 2e-5
LSE_FP8 = 1e-2
LSE_MLA = 3e-5
FP8_PRODUCT = 9e-3  # to bfloat16
EXPERTS = {"float32": 2e-5, "float16": 6e-3, "bfloat16": 5e-2}
GROUPED = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 8e-3}
SCALE = 1e-6
HALF_STEP = 1 + 1e-4  # of the rounding to FP8, in halves of the distance between two codes
LOGPROB = 2e-5  # absolute
# Of the rows of a draw: two scores may lie within float32's rounding of each other.
DRAWS = 0.02
EXACT = 0.0
