// Quantization to INT8 on the GPU, a scale a row. Bound by bytes, as that to FP8 (quantize.cu).
#include "api/quantize.h"
#include "gpu/quantize/quantized_norms.h"

namespace radix::backend {

using namespace quantize;

void per_token_quant_int8(const rk_per_token_quant_int8_args& args, rk_stream stream) {
  dispatch_float(dtype_of(*args.input), [&](auto t) {
    using T = typename decltype(t)::type;
    with_source<T>(*args.input, *args.out, args.gated != 0, [&](const auto& source) {
      quantize_rows<Int8>("per_token_quant_int8", args.input->device, stream, source,
                          result_of(*args.out, *args.scales));
    });
  });
}

void rmsnorm_quant_int8(const rk_rmsnorm_quant_int8_args& args, rk_stream stream) {
  dispatch_float(dtype_of(*args.input), [&](auto t) {
    using T = typename decltype(t)::type;
    quantize_norms_of<Int8, T>("rmsnorm_quant_int8", args.input->device, stream, norm_task(args),
                               result_of(*args.out, *args.scales), 0, dtype_of(*args.weight));
  });
}

}  // namespace radix::backend
