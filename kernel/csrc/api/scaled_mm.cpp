// Scaled_mm family: the gemm family's checks of the same products, then the backend's kernel.
#include "api/scaled_mm.h"

#include "api/gemm_checks.h"

using namespace radix;

namespace {

void check_no_gate(const char* op, int32_t gate) {
  if (gate != RK_GATE_NONE) fail(RK_UNSUPPORTED, "%s: gate is %d, which Hopper's kernels alone have", op, gate);
}

rk_status run_fp8_scaled_mm(const rk_fp8_scaled_mm_args* args, rk_stream stream,
                            void (*run)(const rk_fp8_scaled_mm_args&, rk_stream)) {
  return guard([&] {
    const char* op = "fp8_scaled_mm";
    const auto a = read_args(op, args);
    check_fp8_scaled_mm(op, a);
    check_no_gate(op, a.gate);
    if (!is_empty(*a.out)) run(a, stream);
  });
}

}  // namespace

rk_status rk_int8_scaled_mm_sm80(const rk_int8_scaled_mm_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "int8_scaled_mm";
    const auto a = read_args(op, args);
    check_int8_scaled_mm(op, a);
    check_no_gate(op, a.gate);
    if (!is_empty(*a.out)) backend::int8_scaled_mm_sm80(a, stream);
  });
}

rk_status rk_fp8_scaled_mm_sm89(const rk_fp8_scaled_mm_args* args, rk_stream stream) {
  return run_fp8_scaled_mm(args, stream, backend::fp8_scaled_mm_sm89);
}

rk_status rk_fp8_scaled_mm_sm100(const rk_fp8_scaled_mm_args* args, rk_stream stream) {
  return run_fp8_scaled_mm(args, stream, backend::fp8_scaled_mm_sm100);
}
