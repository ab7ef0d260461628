// Storing and gathering latent tokens and joining full keys for MLA on the CPU. Bound by bytes.
#include "api/mla_kv.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/tensor.h"
#include "cpu/float8.h"
#include "cpu/thread_pool.h"

namespace radix::backend {
namespace {

constexpr int64_t kGrainBytes = 32 * 1024;
constexpr int kLatent = 512, kRope = 64, kGroup = 128;  // of an FP8 token

float widen(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}

// Rounded to nearest even; NaN stays NaN.
uint16_t narrow(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if (x != x) return static_cast<uint16_t>(u >> 16 | 0x40);
  return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// A token in the FP8 form.
void store_fp8(char* to, const char* latent, const char* rope) {
  for (int g = 0; g < kLatent / kGroup; g++) {
    float v[kGroup], largest = 1e-10f;
    for (int i = 0; i < kGroup; i++) {
      uint16_t bits;
      std::memcpy(&bits, latent + (g * kGroup + i) * 2, 2);
      v[i] = widen(bits);
      largest = std::max(largest, std::fabs(v[i]));
    }
    const float scale = largest / cpu::kLargestE4m3;
    for (int i = 0; i < kGroup; i++) to[g * kGroup + i] = static_cast<char>(cpu::to_e4m3(v[i] / scale));
    std::memcpy(to + kLatent + g * 4, &scale, 4);
  }
  std::memcpy(to + kLatent + 16, rope, kRope * 2);
}

// A token of the FP8 form in bf16.
void load_fp8(char* to, const char* token) {
  const auto& values = cpu::e4m3_values();
  const auto* codes = reinterpret_cast<const uint8_t*>(token);
  auto* out = reinterpret_cast<uint16_t*>(to);
  for (int g = 0; g < kLatent / kGroup; g++) {
    float scale;
    std::memcpy(&scale, token + kLatent + g * 4, 4);
    for (int i = g * kGroup; i < (g + 1) * kGroup; i++) out[i] = narrow(values[codes[i]] * scale);
  }
  std::memcpy(to + kLatent * 2, token + kLatent + 16, kRope * 2);
}

// What gather_mla_kv reads, checked: every token's place in the cache exists.
struct Gathered {
  const int32_t *table, *cu, *starts;
  int64_t batch, max_pages, table_row, page_size;

  explicit Gathered(const rk_gather_mla_kv_args& a)
      : table(data_ptr<int32_t>(*a.page_table)),
        cu(data_ptr<int32_t>(*a.cu_seqlens)),
        starts(a.starts ? data_ptr<int32_t>(*a.starts) : nullptr),
        batch(a.page_table->shape[0]),
        max_pages(a.page_table->shape[1]),
        table_row(a.page_table->strides[0]),
        page_size(a.kv_cache->shape[1]) {
    const char* op = "gather_mla_kv";
    if (cu[0] != 0) fail(RK_INVALID, "%s: cu_seqlens[0] is %d, expected 0", op, cu[0]);
    for (int64_t b = 0; b < batch; b++) {
      if (cu[b + 1] < cu[b])
        fail(RK_INVALID, "%s: cu_seqlens[%ld] is %d, less than the one before (%d)", op, b + 1, cu[b + 1], cu[b]);
      check_row(op, b, a.kv_cache->shape[0]);
    }
    if (cu[batch] != a.out->shape[0])
      fail(RK_INVALID, "%s: cu_seqlens ends at %d, expected %ld (tokens of out)", op, cu[batch], a.out->shape[0]);
  }

  int64_t first(int64_t b) const { return starts ? starts[b] : 0; }
  int64_t page(int64_t b, int64_t position) const { return table[b * table_row + position / page_size]; }

 private:
  void check_row(const char* op, int64_t b, int64_t pages) const {
    const int64_t begin = first(b), end = begin + cu[b + 1] - cu[b];
    if (begin < 0 || end > max_pages * page_size)
      fail(RK_INVALID, "%s: row %ld has positions %ld to %ld, expected 0 to %ld (columns of page_table x page size)",
           op, b, begin, end, max_pages * page_size);
    for (int64_t at = begin / page_size * page_size; at < end && begin < end; at += page_size)
      if (page(b, at) < 0 || page(b, at) >= pages)
        fail(RK_INVALID, "%s: page_table[%ld, %ld] is %ld, expected 0 to %ld (pages of kv_cache)", op, b,
             at / page_size, page(b, at), pages - 1);
  }
};

void check_slots(const Indices& slots, int64_t limit) {
  for (int64_t t = 0; t < slots.count(); t++)
    if (slots[t] < -1 || slots[t] >= limit)
      fail(RK_INVALID, "store_mla_kv: slot_mapping[%ld] is %ld, expected -1 to %ld (slots of the cache)", t, slots[t],
           limit - 1);
}

}  // namespace

void store_mla_kv(const rk_store_mla_kv_args& a, rk_stream) {
  const Indices slots(*a.slot_mapping);
  const int64_t page_size = a.kv_cache->shape[1], item = element_size(*a.kv_cache);
  check_slots(slots, a.kv_cache->shape[0] * page_size);
  const int64_t from = element_size(*a.latent);
  const int64_t latent_bytes = a.latent->shape[1] * from, rope_bytes = a.rope->shape[1] * from;
  cpu::parallel_for(slots.count(), 1 + kGrainBytes / (1 + latent_bytes + rope_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      if (slots[t] < 0) continue;
      const char* latent = data_ptr<char>(*a.latent) + t * a.latent->strides[0] * from;
      const char* rope = data_ptr<char>(*a.rope) + t * a.rope->strides[0] * from;
      char* to = data_ptr<char>(*a.kv_cache) + slots[t] / page_size * a.kv_cache->strides[0] * item +
                 slots[t] % page_size * a.kv_cache->strides[1] * item;
      if (item == 1) {
        store_fp8(to, latent, rope);
      } else {
        std::memcpy(to, latent, static_cast<size_t>(latent_bytes));
        std::memcpy(to + latent_bytes, rope, static_cast<size_t>(rope_bytes));
      }
    }
  });
}

void gather_mla_kv(const rk_gather_mla_kv_args& a, rk_stream) {
  const Gathered rows(a);
  const int64_t item = element_size(*a.kv_cache), bytes = a.kv_cache->shape[2] * item;
  const int64_t out_row = a.out->strides[0] * element_size(*a.out);
  cpu::parallel_for(a.out->shape[0], 1 + kGrainBytes / (1 + bytes), [&](int64_t begin, int64_t end) {
    int64_t b = std::upper_bound(rows.cu, rows.cu + rows.batch + 1, begin) - rows.cu - 1;
    for (int64_t t = begin; t < end; t++) {
      while (t >= rows.cu[b + 1]) b++;
      const int64_t position = rows.first(b) + t - rows.cu[b];
      const char* token = data_ptr<char>(*a.kv_cache) + rows.page(b, position) * a.kv_cache->strides[0] * item +
                          position % rows.page_size * a.kv_cache->strides[1] * item;
      char* to = data_ptr<char>(*a.out) + t * out_row;
      if (item == 1) {
        load_fp8(to, token);
      } else {
        std::memcpy(to, token, static_cast<size_t>(bytes));
      }
    }
  });
}

void concat_mla_k(const rk_concat_mla_k_args& a, rk_stream) {
  const int64_t item = element_size(*a.k);
  const int64_t heads = a.k->shape[1], nope_bytes = a.k_nope->shape[2] * item, rope_bytes = a.k_rope->shape[2] * item;
  const int64_t bytes = 1 + heads * (nope_bytes + rope_bytes);
  cpu::parallel_for(a.k->shape[0], 1 + kGrainBytes / bytes, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++)
      for (int64_t h = 0; h < heads; h++) {
        char* to = data_ptr<char>(*a.k) + (t * a.k->strides[0] + h * a.k->strides[1]) * item;
        std::memcpy(to, data_ptr<char>(*a.k_nope) + (t * a.k_nope->strides[0] + h * a.k_nope->strides[1]) * item,
                    static_cast<size_t>(nope_bytes));
        std::memcpy(to + nope_bytes, data_ptr<char>(*a.k_rope) + t * a.k_rope->strides[0] * item,
                    static_cast<size_t>(rope_bytes));
      }
  });
}

}  // namespace radix::backend
