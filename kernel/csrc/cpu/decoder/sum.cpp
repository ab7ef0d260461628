// The op that adds a buffer to another, split over the pool.
#include "cpu/decoder/decoder.h"
#include "cpu/decoder/step.h"
#include "cpu/thread_pool.h"

namespace radix::cpu::decoder {
namespace {

constexpr int64_t kGrainElements = 16 * 1024;

void add_scaled(const rk_tensor& to, const rk_tensor& x, const rk_tensor& scale) {
  Arg("decoder", "scale of an add", &scale).dtype({DType::f32}).shape({to.shape[0], 1}, "one of each token");
  const auto add = decoder_kernels().add_scaled;
  const int64_t columns = to.shape[1], row_bytes = columns * element_size(to);
  parallel_for(to.shape[0], 1 + kGrainElements / columns, [&](int64_t begin, int64_t end) noexcept {
    for (int64_t row = begin; row < end; row++)
      add(dtype_of(to), data_ptr<char>(to) + row * row_bytes, data_ptr<char>(x) + row * row_bytes,
          data_ptr<float>(scale)[row * scale.strides[0]], columns);
  });
}

}  // namespace

void run(const Step& step, const rk_add_op& op) {
  const View to = step.whole(op.to), x = step.whole(op.x);
  const rk_tensor &sum = *static_cast<const rk_tensor*>(to), &from = *static_cast<const rk_tensor*>(x);
  Arg("decoder", "to of an add", &sum).dtype(kFloats).same_dtype(Arg("decoder", "x of an add", &from));
  Arg("decoder", "x of an add", &from).shape({step.tokens(), sum.shape[1]}, "columns of what it is added to");
  if (op.scale.count > 0) {
    if (op.factor != 1.f) fail(RK_INVALID, "decoder: factor of an add is %g, expected 1 beside a scale", op.factor);
    const View scale = step.view(op.scale);
    return add_scaled(sum, from, *static_cast<const rk_tensor*>(scale));
  }
  const DecoderKernels& kernels = decoder_kernels();
  const int64_t item = element_size(sum);
  parallel_for(sum.shape[0] * sum.shape[1], kGrainElements, [&](int64_t begin, int64_t end) noexcept {
    if (op.factor == 1.f)
      kernels.add(dtype_of(sum), data_ptr<void>(sum), data_ptr<void>(from), begin, end);
    else
      kernels.add_scaled(dtype_of(sum), data_ptr<char>(sum) + begin * item, data_ptr<char>(from) + begin * item,
                         op.factor, end - begin);
  });
}

}  // namespace radix::cpu::decoder
