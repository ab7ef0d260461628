// One call of fused_experts as the kernels' launchers take it.
#pragma once

#include <cstdint>

#include "common/tensor.h"
#include "gpu/device/launch.h"
#include "radix_kernels/types.h"

namespace radix::experts {

constexpr int kMaxExperts = 1024;
// Up to so many tokens and pairs (token, place in its top-k) a batch is not sorted.
constexpr int kMmaM16Tokens = 16, kMmaM16Pairs = 128;

static_assert(kMaxExperts % 32 == 0 && kMaxExperts / 32 <= 32, "a bit an expert, a word of bits a lane");
static_assert(kMaxExperts <= INT16_MAX && kMmaM16Pairs <= INT16_MAX, "numbers in shared memory have 16 bits");

constexpr const char* kOp = "fused_experts";

// Who goes where.
struct Routing {
  const int32_t *ids, *map;  // [tokens, topk]; [named] local numbers, or null
  const float* weights;      // [tokens, topk]
  int tokens, topk, named, experts;

  // The expert of a pair as the weights number it; -1: it adds nothing here.
  __device__ int local(int id) const {
    if (id < 0 || id >= named) return -1;
    const int expert = map ? map[id] : id;
    return expert < experts ? expert : -1;
  }
};

struct Problem {
  const char* op = kOp;
  rk_device device;
  rk_stream stream;
  Routing routing;
  DType type;
  const char *x, *w1, *w2;           // [tokens, hidden]; [experts, 2 inter, hidden]; [experts, hidden, inter]
  int64_t x_step;                    // bytes
  const float *w1_scale, *w2_scale;  // of FP8 weights, or null
  bool block_scales;                 // one a block of 128 x 128, else one an expert
  bool fp8_activations;              // x and act are quantised; with block scales
  int experts, hidden, inter;
  char* out;         // [tokens, hidden]
  int64_t out_step;  // elements
  char* workspace;

  int pairs() const { return routing.tokens * routing.topk; }
  bool fits_mma_m16() const { return !fp8_activations && routing.tokens <= kMmaM16Tokens && pairs() <= kMmaM16Pairs; }
};

// Of a sorted batch. `rows` holds the tokens' rows by place, then each pair's result.
struct Scratch {
  char *act, *rows;                // [pairs, inter], [pairs, hidden]
  int32_t *sorted, *offsets;       // [pairs], [named + 1]
  float *act_scales, *row_scales;  // of these in FP8: [inter / 128, scale_step], [hidden / 128, scale_step]
  int scale_step;                  // pairs, up to a multiple of 4
  int32_t* places;                 // [pairs]; of the persistent kernel: the inverse of `sorted`,
  char* tiles;                     // and its TileList
};

using gpu::multiprocessors;

// Element types of the weights and of x.
enum class Format {
  half,     // 16 bits, both
  widened,  // FP8 weights, which become 16 bits in registers
  fp8       // FP8, both; blocks of 128 x 128 of the weights and 128 columns of a row of x have scales
};

// One grouped product: rows of x by the weight of their group.
struct Grouped {
  Problem q;  // device, stream, type and op
  const char *x, *weight;
  int64_t x_step, out_step;        // bytes; elements
  int64_t rows;                    // of x, of all groups together
  int room;                        // rows of each group where that is how x is laid out; else 0
  int groups, n, k, expected;      // expected: rows of a group
  const int32_t *begins, *ends;    // of each group; with room: null, and how many there are
  const float *x_scale, *w_scale;  // [ceil(k / 128), scale_step]; [groups, ceil(n / 128), ceil(k / 128)]
  int scale_step;
  char* out;
};

// The kernels' launchers; sources.cmake names what each is instantiated for. T: of x and the result; W: of the weights.
template <class T, class W>
void grouped_mma_m16(const Problem& problem);
template <class T, Format kFormat>
void grouped_swap_ab(const Problem& problem, const Scratch& scratch);

template <class T, Format kFormat>
void grouped_gemm(const Grouped& g);

}  // namespace radix::experts
