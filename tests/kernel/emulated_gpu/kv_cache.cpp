// The KV store's device code, a thread after the other: copies, and to FP8 every bfloat16 there is against the table of
// e4m3's values.
#include "harness.h"

#include "gpu/kv/kv_cache.cu"

namespace radix::backend {
DType native_fp8(rk_device) {  // NVIDIA's
  return DType::f8e4m3;
}
}  // namespace radix::backend

namespace {

using namespace emulated;
using namespace radix;

constexpr int kTokens = 64, kHeads = 4, kDim = 256, kSlots = 80;  // 65,536 elements
constexpr float kScales[kHeads] = {1, 0.5f, 0.0037f, 1e4f};

// The nearest, an even code of two; searched for, not computed.
uint8_t nearest(float x) {
  if (std::isnan(x)) return 0x7f;
  const double a = std::fabs(static_cast<double>(x));
  int best = 0;
  for (int code = 1; code < 0x7f; code++) {
    const double d = std::fabs(e4m3_value(code) - a), least = std::fabs(e4m3_value(best) - a);
    if (d < least || (d == least && code % 2 == 0)) best = code;
  }
  if (a > e4m3_value(0x7e)) best = 0x7e;
  return static_cast<uint8_t>(best | (std::signbit(x) ? 0x80 : 0));
}

// Rows [kTokens, kHeads, dim] and a cache of pages that hold head by head.
struct Tensors {
  std::vector<uint8_t> rows, cache;
  int64_t row_shape[3], row_strides[3], shape[4], strides[4];
  rk_tensor r{}, c{};

  Tensors(int64_t dim, rk_dtype row_type, rk_dtype cache_type)
      : rows(kTokens * kHeads * dim * row_type.bits / 8),
        cache(kSlots * kHeads * dim * cache_type.bits / 8, 0x55),
        row_shape{kTokens, kHeads, dim},
        row_strides{kHeads * dim, dim, 1},
        shape{kSlots / 16, 16, kHeads, dim},
        strides{16 * kHeads * dim, dim, 16 * dim, 1} {
    r.data = rows.data(), r.ndim = 3, r.shape = row_shape, r.strides = row_strides, r.dtype = row_type;
    c.data = cache.data(), c.ndim = 4, c.shape = shape, c.strides = strides, c.dtype = cache_type;
  }
  int64_t at(int64_t slot, int64_t head) const {  // element
    return slot / 16 * strides[0] + slot % 16 * strides[1] + head * strides[2];
  }
};

template <class Side>
void run_store(const Side& side, const int64_t* slots) {
  gridDim = dim3(kTokens / 2);
  for (unsigned block = 0; block < gridDim.x; block++)
    for (int thread = 0; thread < kThreads; thread++) {
      blockIdx = dim3(block), threadIdx = dim3(thread);
      store_kernel(side, side, slots, 1, kTokens, 16, kSlots);
    }
}

template <int N>
void check_quantized(bool per_head, const int64_t* slots) {
  Tensors t(kDim, {RK_CODE_BFLOAT, 16, 1}, {RK_CODE_FLOAT8_E4M3FN, 8, 1});
  auto* rows = reinterpret_cast<bf16*>(t.rows.data());
  for (int i = 0; i < 1 << 16; i++) rows[i].bits = static_cast<uint16_t>(i * 40503);  // odd: each once
  run_store(Quantized<bf16, N>{Heads(t.r, t.c, N), kScales, per_head}, slots);
  std::vector<uint8_t> expected(t.cache.size(), 0x55);
  for (int token = 0; token < kTokens; token++)
    for (int i = 0; i < kHeads * kDim && slots[token] >= 0; i++) {
      const int head = i / kDim;
      const float x = to_float(rows[token * kHeads * kDim + i]) / kScales[per_head ? head : 0];
      expected[t.at(slots[token], head) + i % kDim] = nearest(x);
    }
  for (size_t at = 0; at < t.cache.size(); at++) {
    const int got = t.cache[at], wanted = expected[at], size = wanted & 0x7f;
    const bool any_sign = size == 0x7f || size == 0;  // NaN, zero
    if (got != wanted && !(any_sign && (got & 0x7f) == size)) fail_test("code", got, static_cast<int>(at));
  }
}

template <class Word>
void check_copied(int64_t dim, uint8_t bits, const int64_t* slots) {
  Tensors t(dim, {RK_CODE_FLOAT, bits, 1}, {RK_CODE_FLOAT, bits, 1});
  const int64_t item = bits / 8, bytes = dim * item;
  for (auto& x : t.rows) x = static_cast<uint8_t>(std::rand());
  run_store(Copied<Word>{Heads(t.r, t.c, static_cast<int64_t>(sizeof(Word)) / item)}, slots);
  std::vector<uint8_t> expected(t.cache.size(), 0x55);
  for (int token = 0; token < kTokens; token++)
    for (int head = 0; head < kHeads && slots[token] >= 0; head++)
      std::memcpy(&expected[t.at(slots[token], head) * item], &t.rows[(token * kHeads + head) * bytes], bytes);
  if (t.cache != expected) fail_test("copy", static_cast<int>(dim), bits);
}

}  // namespace

int main() {
  std::vector<int64_t> slots(kTokens);
  for (int t = 0; t < kTokens; t++) slots[t] = t * 7 % kSlots;
  slots[3] = -1;
  for (bool per_head : {false, true}) {
    check_quantized<8>(per_head, slots.data());
    check_quantized<1>(per_head, slots.data());
  }
  check_copied<Wide>(24, 16, slots.data());
  check_copied<uint16_t>(21, 16, slots.data());
  check_copied<uint32_t>(5, 32, slots.data());
  std::printf("65536 numbers, four ways; copies, three\n");
  return 0;
}
