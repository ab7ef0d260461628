// The op that multiplies columns by a number of each position, split over the pool.
#include "cpu/decoder/decoder.h"
#include "cpu/decoder/step.h"
#include "cpu/thread_pool.h"

namespace radix::cpu::decoder {
namespace {

constexpr int64_t kGrainElements = 16 * 1024;

void check_positions(const Indices& positions, int64_t count) {
  for (int64_t t = 0; t < positions.count(); t++)
    if (positions[t] < 0 || positions[t] >= count)
      fail(RK_INVALID, "decoder: positions[%lld] is %lld, expected 0 to %lld (factors of a scale)", (long long)t,
           (long long)positions[t], (long long)(count - 1));
}

}  // namespace

void run(const Step& step, const rk_scale_op& op) {
  const View view = step.view(op.x);
  const rk_tensor& x = *static_cast<const rk_tensor*>(view);
  Arg("decoder", "x of a scale", &x).dtype(kFloats);
  const Arg factors("decoder", "factors of a scale", op.factors);
  factors.dtype({DType::f32}).ndim(1).contiguous();
  Arg("decoder", "positions", step.args.positions)
      .dtype({DType::i32, DType::i64})
      .shape({step.tokens()}, "tokens of hidden");
  const Indices positions(*step.args.positions);
  check_positions(positions, factors.size(0));
  const float* const table = data_ptr<float>(*factors);
  const auto scale = decoder_kernels().scale;
  const int64_t columns = x.shape[1], row_bytes = x.strides[0] * element_size(x);
  parallel_for(x.shape[0], 1 + kGrainElements / columns, [&](int64_t begin, int64_t end) noexcept {
    for (int64_t row = begin; row < end; row++)
      scale(dtype_of(x), data_ptr<char>(x) + row * row_bytes, table[positions[row]], columns);
  });
}

}  // namespace radix::cpu::decoder
