// The largest output of a row and its number, without the outputs: each thread keeps the largest sums of its blocks,
// one for each of their 16 lanes, and here they are compared.
#include <algorithm>
#include <limits>
#include <vector>

#include "api/linear.h"
#include "common/tensor.h"
#include "cpu/linear/kernels.h"
#include "cpu/thread_pool.h"

namespace radix {
namespace {

using namespace cpu;

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Best {
  float value = -kInf;
  int64_t id = -1;

  void offer(const LaneMaxima& row) {
    for (int i = 0; i < linear_layout::kBlockN; i++) {
      const int64_t other = static_cast<int64_t>(row.block[i]) * linear_layout::kBlockN + i;
      if (row.value[i] < value || (row.value[i] == value && id >= 0 && other > id)) continue;
      value = row.value[i];
      id = other;
    }
  }
  bool found() const { return value > -kInf && value < kInf; }
};

}  // namespace

namespace backend {

void linear_argmax(const rk_linear_argmax_args& args, rk_stream) {
  static thread_local std::vector<LaneMaxima> memory;
  const int64_t m = args.x->shape[0], threads = num_threads();
  memory.resize(threads * m);
  RowMaxima maxima{memory.data(), threads, 0};
  rk_linear_args product{sizeof product, args.desc, args.x, args.packed};
  linear_kernels().products(&product, 1, &maxima);
  for (int64_t row = 0; row < m; row++) {
    Best best;
    for (int64_t part = 0; part < std::min(maxima.claimed, maxima.most); part++)
      best.offer(maxima.parts[part * m + row]);
    data_ptr<int32_t>(*args.ids)[row] = best.found() ? static_cast<int32_t>(best.id) : -1;
    data_ptr<float>(*args.maxima)[row] = best.found() ? best.value : std::numeric_limits<float>::quiet_NaN();
  }
}

}  // namespace backend
}  // namespace radix
