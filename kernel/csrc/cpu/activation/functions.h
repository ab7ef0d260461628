// The gated activations on registers: act(gate, up) in float32.
#pragma once

#include "cpu/simd_math.h"
#include "radix_kernels/activation.h"

namespace radix::cpu::RK_ISA {

struct Silu {
  explicit Silu(const rk_gating&) {}
  Vec operator()(Vec gate, Vec up) const { return gate / (set1(1.f) + exp(zero() - gate)) * up; }
};

struct Gelu {
  explicit Gelu(const rk_gating&) {}
  Vec operator()(Vec gate, Vec up) const { return gate * normal_cdf(gate) * up; }
};

// x/2 (1 + tanh(u)) = x / (1 + e^-2u)
struct GeluTanh {
  explicit GeluTanh(const rk_gating&) {}
  Vec operator()(Vec gate, Vec up) const {
    constexpr float kTwoSqrt2OverPi = 1.59576912160573071f;
    const Vec u2 = gate * set1(kTwoSqrt2OverPi) * fma(gate * gate, set1(0.044715f), set1(1.f));
    return gate / (set1(1.f) + exp(zero() - u2)) * up;
  }
};

struct ClampedSwiGlu {
  explicit ClampedSwiGlu(const rk_gating& gating)
      : alpha(set1(gating.alpha)), most(set1(gating.limit)), least(set1(-gating.limit)) {}
  Vec operator()(Vec gate, Vec up) const {
    gate = at_most(gate);
    up = at_most(up);
    up = select(lt(up, least), least, up);
    return gate / (set1(1.f) + exp(zero() - alpha * gate)) * (up + set1(1.f));
  }

 private:
  Vec at_most(Vec x) const { return select(lt(most, x), most, x); }  // a NaN is not less than anything: it stays

  Vec alpha, most, least;
};

// Calls fn(act) with the function of a gating that was checked.
template <class Fn>
inline auto with_activation(const rk_gating& gating, const Fn& fn) {
  switch (gating.activation) {
    case RK_ACTIVATION_GELU: return fn(Gelu(gating));
    case RK_ACTIVATION_GELU_TANH: return fn(GeluTanh(gating));
    case RK_ACTIVATION_SWIGLU_CLAMPED: return fn(ClampedSwiGlu(gating));
    default: return fn(Silu(gating));
  }
}

}  // namespace radix::cpu::RK_ISA
