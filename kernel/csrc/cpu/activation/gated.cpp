// out = act(gate) * up. In memory order bound by bytes; out of cache by the exponential (about 12 multiply-adds and a
// division for each vector).
#include "cpu/activation/activation.h"
#include "cpu/simd_math.h"

namespace radix::cpu::RK_ISA {
namespace {

constexpr int W = Vec::width;
static_assert(kGatedBlock % W == 0);

struct Silu {
  static Vec apply(Vec x) { return x / (set1(1.f) + exp(zero() - x)); }
};

struct Gelu {
  static Vec apply(Vec x) { return x * normal_cdf(x); }
};

// x/2 (1 + tanh(u)) = x / (1 + e^-2u)
struct GeluTanh {
  static Vec apply(Vec x) {
    constexpr float kTwoSqrt2OverPi = 1.59576912160573071f;
    const Vec u2 = x * set1(kTwoSqrt2OverPi) * fma(x * x, set1(0.044715f), set1(1.f));
    return x / (set1(1.f) + exp(zero() - u2));
  }
};

template <class Act, class T>
void gate_columns(const T* gate, const T* up, T* out, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, Act::apply(load(gate + i)) * load(up + i));
  if (const int tail = static_cast<int>(n - i); tail > 0)
    store(out + i, Act::apply(load(gate + i, tail)) * load(up + i, tail), tail);
}

template <class Act>
void gated(const GatedTask& task, int64_t begin, int64_t end) {
  dispatch_float(task.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    for (int64_t unit = begin; unit < end; unit++) {
      const int64_t row = unit / task.blocks_per_row, column = unit % task.blocks_per_row * kGatedBlock;
      const int64_t left = task.width - column;
      const T* gate = task.input.at<T>(row) + column;
      gate_columns<Act>(gate, gate + task.width, task.out.at<T>(row) + column, left < kGatedBlock ? left : kGatedBlock);
    }
  });
}

}  // namespace

const ActivationKernels activation_table = {gated<Silu>, gated<Gelu>, gated<GeluTanh>};

}  // namespace radix::cpu::RK_ISA
