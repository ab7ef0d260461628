// A decoder's layers, and a step of up to eight tokens through all of them, as the persistent kernel takes them.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "radix_kernels/types.h"

namespace radix::persistent_decoder {

constexpr int kMaxTokens = 8;
constexpr int kHeadDim = 128;
constexpr int kMaxGroup = 8;              // query heads of a KV head
constexpr int kMaxSplits = 32;            // parts of a row's context
constexpr int kPartWords = kHeadDim + 2;  // of a head's result in a part: its maximum and sum, then the dims
constexpr int kMaxExperts = 256;
constexpr int kMaxTopK = 8;  // experts that a token passes

// What the layers of a model are. The kernel is compiled for each, so that those of one have no instruction of
// another's.
template <bool kMixture_, bool kScaled_>
struct Form {
  static constexpr bool kMixture = kMixture_;  // the MLP is a mixture of experts
  static constexpr bool kScaled = kScaled_;    // all weights but a router's are E4M3 with scales, else bf16
};

// [rows, k], contiguous: bf16, or, with scales [rows / kBlock, k / kBlock], E4M3.
struct Weight {
  const void* data;
  const float* scales;
};
constexpr int kBlock = 128;

// One layer, in device memory. What a model lacks is NULL. A mixture has a router [experts, hidden_size], and its
// gate_up and down are those of one expert after another.
struct Layer {
  Weight qkv, o, router, gate_up, down;
  const bf16* qkv_bias;
  const bf16 *input_norm, *post_norm;
  const float *q_norm, *k_norm;
  bf16 *k_cache, *v_cache;
};

// Elements between the pages, slots and heads of a cache.
struct CacheSteps {
  int64_t page, slot, head;
};

// What blocks hand each other: words of exchange.cuh. Zero before the first launch.
struct Workspace {
  uint64_t* hidden;    // [kMaxTokens, hidden_size / 2]: pairs of bf16
  uint64_t* qkv;       // [kMaxTokens, qkv_rows / 2]
  uint64_t* attended;  // [kMaxTokens, heads * kHeadDim / 2]
  uint64_t* logits;    // [kMaxTokens, experts]: floats
  uint64_t* gated;     // [kMaxTokens, gated_size / 2]
  uint64_t* parts;     // [kMaxTokens, heads, kMaxSplits, kPartWords]: floats
  uint32_t* control;   // the flag of the next launch, and how many blocks have left this one
};

struct Params {
  const Layer* layers;
  int num_layers;
  int tokens;  // 1 to kMaxTokens, one of each row
  int hidden_size, heads, kv_heads;
  int width;           // of the MLP, or of an expert
  int gated_size;      // what a token has behind the activation: that of the MLP, or of its experts together
  int experts, top_k;  // of a layer, and of a token; 0: the layers are dense
  bool renormalize;    // the weights of a token's experts add up to 1
  float eps, qk_eps;
  float score_scale;  // times log2(e)
  bf16* hidden;       // [tokens, hidden_size]: the embeddings, then the normed output
  const bf16* final_norm;
  const float* cos_sin;  // [max_position, kHeadDim]
  int64_t max_position;
  const int32_t* positions;
  const int64_t* slots;
  const int32_t* page_table;
  int64_t page_table_step;
  const int32_t* kv_lens;
  int page_shift;  // log2 of a page's tokens
  int num_slots;
  CacheSteps cache;
  Workspace workspace;
};

__host__ __device__ inline int qkv_rows(const Params& p) {
  return (p.heads + 2 * p.kv_heads) * kHeadDim;
}

// launch.cuh. One instantiation an object (sources.cmake).
template <class Form>
void launch(const Params& p, rk_device device, rk_stream stream);

}  // namespace radix::persistent_decoder
