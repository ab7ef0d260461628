// What the Hopper attention kernels share: the arguments of one call as plain numbers, and who serves which call.
//
// attention.cu (the front) turns a checked call into Params and chooses: decode (decode*.cu) for a few query tokens a
// row, prefill (prefill*.cu) for everything else.
#pragma once

#include "common/dtype.h"
#include "gpu/device/fp8.h"
#include "radix_kernels/attention.h"

namespace radix::attention {

// What is known on the host without reading the device; enough to choose a kernel and to size its workspace.
struct Shape {
  int64_t tokens = 0;  // of q, over all rows
  int64_t batch = 0;
  int heads = 0, kv_heads = 0;
  int head_dim = 0;              // of q and k
  int v_dim = 0;                 // of v and out
  int page_size = 0;             // 0: k and v are contiguous, cu_k cuts them into rows
  int64_t max_pages = 0;         // width of the page table
  bool any_split = true;         // short rows of a small batch may be split finer
  int64_t max_seqlen_q = 0;      // a hint about speed, at least 1 where tokens > 0; a row may have more query tokens
  DType dtype = DType::bf16;     // of out: bf16 or f16
  DType q_dtype = DType::bf16;   // dtype, or f8e4m3 if k and v are that
  DType kv_dtype = DType::bf16;  // dtype, or f8e4m3

  __host__ __device__ int group() const { return heads / kv_heads; }
};

// One call. Strides are in elements; the last dimension is contiguous. Addresses are computed in 64 bits.
struct Params : Shape {
  const void* q = nullptr;         // [tokens, heads, head_dim]
  void* out = nullptr;             // [tokens, heads, v_dim]
  float* lse = nullptr;            // [tokens, heads], or NULL: natural log, sinks included
  const float* sinks = nullptr;    // [heads], or NULL
  const void* k = nullptr;         // [pages, page_size, kv_heads, head_dim], or [kv_tokens, kv_heads, head_dim]
  const void* v = nullptr;         // the same, v_dim
  const float* q_scale = nullptr;  // FP8 only: one float, or one for each KV head
  const float* k_scale = nullptr;
  const float* v_scale = nullptr;
  bool scale_per_head = false;

  const int32_t* page_table = nullptr;  // [batch, max_pages]; NULL: contiguous
  const int32_t* kv_lens = nullptr;     // [batch]; NULL: contiguous
  const int32_t* cu_q = nullptr;        // [batch + 1]
  const int32_t* cu_k = nullptr;        // [batch + 1]; NULL: paged

  int64_t q_token = 0, q_head = 0, out_token = 0, out_head = 0, lse_token = 0, lse_head = 0;
  int64_t k_page = 0, k_token = 0, k_head = 0, v_page = 0, v_token = 0, v_head = 0;  // *_page: 0 when contiguous
  int64_t table_row = 0;
  int64_t kv_pages = 0, kv_tokens = 0;  // size of k's first dimension: pages, or tokens when contiguous

  float scale = 1;    // softmax_scale
  float softcap = 0;  // 0: off
  bool causal = false;
  int window_left = -1;  // -1: all

  void* workspace = nullptr;  // 256-byte aligned
  int64_t workspace_size = 0;
  rk_device device{};
};

// A row's bits may depend on the choice below, so it must not depend on the other rows' lengths: only on Shape.
//
// Decode serves few query tokens a row: paged KV, head dimensions that decode*.cu names.
bool decode_serves(const Shape& shape);
int64_t decode_workspace_size(const Shape& shape);
void run_decode(const Params& params, rk_stream stream);

// Prefill serves every Shape that passed the front's checks.
int64_t prefill_workspace_size(const Shape& shape);
void run_prefill(const Params& params, rk_stream stream);

}  // namespace radix::attention
