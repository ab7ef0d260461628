// CPU sampling family: the passes over a part of a row of logits (passes.cpp, once per ISA level), and what row.cpp and
// logprobs.cpp make of them for a whole row.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/isa.h"

namespace radix::cpu {

// What the noise of a row depends on.
struct DrawKey {
  uint64_t seed;
  uint32_t position, stream;
};

// Consecutive ids from `first` on, a multiple of 4, and their Philox words; those past the row's end mean nothing.
struct DrawBatch {
  static constexpr int kMost = 32;
  int64_t first = 0, count = 0;
  uint32_t words[kMost];
};

// Which ids may be drawn: bit i % 32 of allowed[i / 32]; null: all. A pass over a part of a row begins at a multiple of
// 32 ids.
struct SamplingKernels {
  // The largest allowed of x[0, n), -inf where there is none; NaN when one of them is.
  float (*max)(const float* x, const uint32_t* allowed, int64_t n);
  // The place of the first allowed of x[0, n) that is `value`, where no allowed one is larger; n: there is none.
  int64_t (*find)(const float* x, const uint32_t* allowed, float value, int64_t n);
  // out = x / divisor, -inf where x is not allowed; out may be x.
  void (*divide)(const float* x, const uint32_t* allowed, float divisor, float* out, int64_t n);
  // Sum of exp(x - shift) in float64 over blocks summed in float32.
  double (*sum_exp)(const float* x, float shift, int64_t n);
  // out = exp(x - shift).
  void (*exp)(const float* x, float shift, float* out, int64_t n);
  // The first batch of ids from `begin` on, a multiple of 4, and below `end` of which one may reach the score `least`
  // (x + noise); false: there is none.
  bool (*next_batch)(const float* x, int64_t begin, int64_t end, const DrawKey& key, float least, DrawBatch* batch);
};
RK_CPU_TABLE(SamplingKernels, sampling)

// What a draw from one row depends on besides its logits.
struct RowSettings {
  float temperature, top_p, min_p;
  int32_t top_k;
  DrawKey key;
};

// The id drawn from the allowed of x[0, n), -1 when there is none: see radix_kernels/sampling.h.
int32_t draw_row(const float* x, const uint32_t* allowed, int64_t n, const RowSettings& settings);

// As the kernels and first_ids (order.h), by all threads when called outside of the pool; the result is the same.
float row_max(const float* x, const uint32_t* allowed, int64_t n);
double row_sum_exp(const float* x, float shift, int64_t n);
void row_first_ids(const float* x, int64_t n, int64_t count, std::vector<int32_t>& ids);

// Log-softmax of a row at id (negative: NaN) and of its top_n largest.
void row_logprobs(const float* x, int64_t n, int32_t id, int64_t top_n, float* logprob, float* top_logprobs,
                  int32_t* top_ids);

}  // namespace radix::cpu
