// The check of an activation by number.
#pragma once

#include <cmath>

#include "common/check.h"
#include "radix_kernels/activation.h"

namespace radix {

inline void check_gating(const char* op, const rk_gating& gating) {
  if (gating.activation < RK_ACTIVATION_SILU || gating.activation > RK_ACTIVATION_SWIGLU_CLAMPED)
    fail(RK_INVALID, "%s: activation is %d, expected a value of RK_ACTIVATION_*", op, gating.activation);
  if (gating.activation != RK_ACTIVATION_SWIGLU_CLAMPED) {
    if (gating.alpha != 0 || gating.limit != 0)
      fail(RK_INVALID, "%s: alpha and limit are %g and %g, expected 0 for activation %d", op, gating.alpha,
           gating.limit, gating.activation);
    return;
  }
  if (!std::isfinite(gating.alpha)) fail(RK_INVALID, "%s: alpha is %g, expected a finite number", op, gating.alpha);
  if (!(gating.limit > 0)) fail(RK_INVALID, "%s: limit is %g, expected a number above 0", op, gating.limit);
}

}  // namespace radix
