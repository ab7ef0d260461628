// CPU attention family: what the backend (attention.cpp, compiled once) hands to the kernels (once per ISA level).
#pragma once

#include "common/tensor.h"
#include "cpu/isa.h"
#include "radix_kernels/attention.h"

namespace radix::cpu {

// KV is cut at multiples of this many tokens, whatever the batch, so that a row's sums have one order.
constexpr int kSplitTokens = 512;
// The latent values of MLA, with its rotary ones for keys; attention over keys and values ends at 256.
constexpr int kMaxKeyDim = 576, kMaxValueDim = 512;
// Query heads of one KV head that a task works on at once; with fewer than the least, reading its KV would be most of
// the work.
constexpr int kMaxTaskRows = 32, kMinTaskRows = 8;
// Query rows (tokens x heads of one KV head) of a prefill tile: by FMA, by AMX.
constexpr int kMaxLaneRows = 192;
constexpr int kMaxTileRows = 1024;

// A [.., heads, dim] tensor by byte strides.
struct HeadsView {
  char* data;
  int64_t token_stride, head_stride;
};

// K or V: paged (a page table row names the pages) or contiguous (page_stride unused).
struct KvView {
  char* data;
  int64_t page_stride, token_stride, head_stride;
};

// The scales of INT8 K or V: float32 [pages, page_size, kv_heads]; strides in elements.
struct ScaleView {
  const float* data;  // NULL: K and V are of q's dtype
  int64_t page_stride, token_stride, head_stride;
};

// Everything a task needs. All pointers are borrowed for the time of the op.
struct AttentionTask {
  HeadsView q, out;
  KvView k, v;
  ScaleView k_scale, v_scale;
  const int32_t* page_table;  // NULL: contiguous, and cu_seqlens_k says where a row begins
  int64_t page_table_stride;
  int64_t page_size;
  const int32_t* kv_lens;  // paged
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;  // contiguous
  const float* sinks;           // [Hq] or NULL
  float* lse;                   // or NULL
  int64_t lse_token_stride, lse_head_stride;
  int64_t heads, kv_heads;
  int64_t key_dim, value_dim;  // multiples of 16
  DType dtype;
  rk_attention_options options;
};

// The rows of one task: q tokens [token, token + tokens) of batch row b, heads [head, head + group) of kv_head.
struct AttentionTile {
  int64_t batch, token, tokens, kv_head, head, group;
  int64_t work;  // rows x KV tokens, about: tasks of more work begin earlier
};

// A part of the KV of a row that has one q token: positions [begin, end) between two multiples of kSplitTokens, seen by
// `group` query heads of each of kv_heads KV heads, the first of which are `head` and `kv_head`.
struct DecodeItem {
  int64_t batch, token, kv_head, kv_heads, head, group, begin, end;
  int64_t row;     // index of its DecodeRow
  float* partial;  // a result for each of its query heads: partial_stride() floats
};

// A partial result: maximum, sum, padding to a cache line, then the values, not divided by the sum.
constexpr int64_t kPartialHead = 16;
constexpr int64_t partial_stride(int64_t value_dim) {
  return kPartialHead + value_dim;
}

// The row that the items are parts of. partial: [parts][heads] results, parts in the order of positions.
struct DecodeRow {
  int64_t token, parts;
  const float* partial;
};

struct AttentionKernels {
  void (*tile)(const AttentionTask& task, const AttentionTile& tile);          // at most kMaxLaneRows rows
  void (*prefill_tile)(const AttentionTask& task, const AttentionTile& tile);  // bf16, kMaxTileRows rows; or NULL
  void (*decode_part)(const AttentionTask& task, const DecodeItem& item);
  void (*decode_combine)(const AttentionTask& task, const DecodeRow& row);
  void (*merge_state)(const rk_merge_state_args& args, int64_t begin, int64_t end);
};
RK_CPU_TABLE(AttentionKernels, attention)

}  // namespace radix::cpu
