// The host side of prefill: what it serves, and the numbers that its kernels want.
#include "sm90/attention/prefill.cuh"

#include <algorithm>

#include "common/error.h"

namespace radix::attention {
namespace {

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kMaxGroup = 128;  // packed rows of a tile

int log2_exact(int n) {
  return n > 0 && (n & (n - 1)) == 0 ? __builtin_ctz(n) : -1;
}

}  // namespace

int64_t prefill_workspace_size(const Shape&) {
  return 0;
}

void run_prefill(const Params& p, rk_stream stream) {
  const bool fp8 = p.q_dtype == DType::f8e4m3;
  if (!fp8 && p.kv_dtype == DType::f8e4m3)
    fail(RK_UNSUPPORTED, "flash_attn: prefill has no FP8 KV for queries of another type");
  if (fp8 && std::max(p.head_dim, p.v_dim) > prefill::kMaxFp8Dim)
    fail(RK_UNSUPPORTED, "flash_attn: prefill serves FP8 up to head dimension %d, got %d and %d", prefill::kMaxFp8Dim,
         p.head_dim, p.v_dim);
  if (p.group() > kMaxGroup)
    fail(RK_UNSUPPORTED, "flash_attn: prefill serves up to %d query heads a KV head, got %d", kMaxGroup, p.group());
  if (!(p.scale > 0)) fail(RK_UNSUPPORTED, "flash_attn: prefill wants softmax_scale above 0, got %g", p.scale);
  prefill::Args a;
  a.p = p;
  a.page_shift = log2_exact(p.page_size);
  if (p.softcap > 0) {
    a.cap_in = p.scale / p.softcap;
    a.cap_out = p.softcap * kLog2E;
    a.scale_log2 = 1;
  } else {
    a.scale_log2 = p.scale * kLog2E;
  }
  if (fp8) return prefill::launch<e4m3>(a, stream);
  p.dtype == DType::bf16 ? prefill::launch<bf16>(a, stream) : prefill::launch<f16>(a, stream);
}

}  // namespace radix::attention
