// The op that adds a buffer to another, split over the pool.
#include "cpu/decoder/decoder.h"
#include "cpu/decoder/step.h"
#include "cpu/thread_pool.h"

namespace radix::cpu::decoder {

void run(const Step& step, const rk_add_op& op) {
  constexpr int64_t kGrainElements = 16 * 1024;
  const View to = step.whole(op.to), x = step.whole(op.x);
  const rk_tensor &sum = *static_cast<const rk_tensor*>(to), &from = *static_cast<const rk_tensor*>(x);
  Arg("decoder", "to of an add", &sum).dtype(kFloats).same_dtype(Arg("decoder", "x of an add", &from));
  Arg("decoder", "x of an add", &from).shape({step.tokens(), sum.shape[1]}, "columns of what it is added to");
  const auto add = decoder_kernels().add;
  parallel_for(sum.shape[0] * sum.shape[1], kGrainElements, [&](int64_t begin, int64_t end) noexcept {
    add(dtype_of(sum), data_ptr<void>(sum), data_ptr<void>(from), begin, end);
  });
}

}  // namespace radix::cpu::decoder
