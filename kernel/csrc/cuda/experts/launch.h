// One call of fused_experts as the kernels' launchers take it.
#pragma once

#include "common/tensor.h"
#include "radix_kernels/types.h"

namespace radix::experts {

constexpr int kMaxExperts = 1024;
// Up to so many tokens and pairs (token, place in its top-k) a batch is not sorted.
constexpr int kFewTokens = 16, kFewPairs = 128;

// Who goes where.
struct Routing {
  const int32_t *ids, *map;  // [tokens, topk]; [named] local numbers, or null
  const float* weights;      // [tokens, topk]
  int tokens, topk, named;
};

struct Problem {
  rk_device device;
  rk_stream stream;
  Routing routing;
  DType type;
  const char *x, *w1, *w2;           // [tokens, hidden]; [experts, 2 inter, hidden]; [experts, hidden, inter]
  int64_t x_step;                    // bytes
  const float *w1_scale, *w2_scale;  // of FP8 weights, or null
  bool block_scales;                 // one a block of 128 x 128, else one an expert
  int experts, hidden, inter;
  char* out;         // [tokens, hidden]
  int64_t out_step;  // elements
  char* workspace;

  int pairs() const { return routing.tokens * routing.topk; }
  bool few() const { return routing.tokens <= kFewTokens && pairs() <= kFewPairs; }
};

// Of a sorted batch. `rows` holds the tokens' rows by place, then each pair's result.
struct Scratch {
  char *act, *rows;           // [pairs, inter], [pairs, hidden]
  int32_t *sorted, *offsets;  // [pairs], [named + 1]
};

constexpr const char* kOp = "fused_experts";

int multiprocessors(rk_device device);

void few_bf16(const Problem& problem);
void few_f16(const Problem& problem);
void few_bf16_fp8(const Problem& problem);
void few_f16_fp8(const Problem& problem);
void many_bf16(const Problem& problem, const Scratch& scratch);
void many_f16(const Problem& problem, const Scratch& scratch);
void many_bf16_fp8(const Problem& problem, const Scratch& scratch);
void many_f16_fp8(const Problem& problem, const Scratch& scratch);

}  // namespace radix::experts
