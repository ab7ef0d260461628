// out = act(gate, up). In memory order bound by bytes; out of cache by the exponential (about 12 multiply-adds and a
// division for each vector).
#include "cpu/activation/activation.h"
#include "cpu/activation/functions.h"

namespace radix::cpu::RK_ISA {
namespace {

constexpr int W = Vec::width;
static_assert(kGatedBlock % W == 0);

template <class Act, class T>
void gate_columns(const Act& act, const T* gate, const T* up, T* out, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, act(load(gate + i), load(up + i)));
  if (const int tail = static_cast<int>(n - i); tail > 0)
    store(out + i, act(load(gate + i, tail), load(up + i, tail)), tail);
}

void gated(const GatedTask& task, int64_t begin, int64_t end) {
  with_activation(task.gating, [&](const auto& act) {
    dispatch_float(task.dtype, [&](auto t) {
      using T = typename decltype(t)::type;
      for (int64_t unit = begin; unit < end; unit++) {
        const int64_t row = unit / task.blocks_per_row, column = unit % task.blocks_per_row * kGatedBlock;
        const int64_t left = task.width - column, count = left < kGatedBlock ? left : kGatedBlock;
        const T* gate = task.input.at<T>(row) + column;
        gate_columns(act, gate, gate + task.width, task.out.at<T>(row) + column, count);
      }
    });
  });
}

}  // namespace

const ActivationKernels activation_table = {gated};

}  // namespace radix::cpu::RK_ISA
