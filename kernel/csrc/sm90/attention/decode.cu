// Paged decode, the host side: what it serves, its space, its launches. See split_plan.cuh.
#include "sm90/attention/decode.cuh"

#include <algorithm>

namespace radix::attention {
namespace {

using namespace decode;

constexpr int kMostQueries = 16;
constexpr int kChunkLog2 = __builtin_ctz(kChunkTokens);

int groups_of(const Shape& s) {
  return std::max(1, kMaxBlocks / s.kv_heads);
}

int tile_rows(const Shape& s) {
  return s.max_seqlen_q * s.group() > 16 && s.head_dim <= 128 ? 32 : 16;
}

// Most tokens of a short row: so many that its chunks of 128 tokens do not outnumber the blocks by far. FP8 has none:
// its warps take more tokens at once.
int short_row_of(const Shape& s) {
  constexpr int64_t kTokensOfChip = 80 * kMaxBlocks;
  return !s.any_split || s.kv_dtype == DType::f8e4m3 ? 0 : static_cast<int>(kTokensOfChip / (s.batch * s.kv_heads));
}

// As decode_kernel.cuh rounds it: FP8 values take at least 128 dimensions.
int vec_dim(const Shape& s) {
  return s.head_dim <= 128 ? 128 : 256;
}

// Of strides in elements.
CacheStrides strides_of(const Params& p, int64_t page, int64_t token) {
  const int64_t bytes = p.kv_dtype == DType::f8e4m3 ? 1 : 2;
  return cache_strides("flash_attn_with_kvcache", p.kv_pages, p.page_size, page * bytes, token * bytes);
}

}  // namespace

bool decode_serves(const Shape& s) {
  return s.page_size > 0 && s.max_pages > 0 && s.max_seqlen_q <= kMostQueries && s.head_dim <= kMaxVecDim &&
         s.v_dim == s.head_dim && s.q_dtype == s.dtype;
}

int64_t decode_workspace_size(const Shape& s) {
  if (!decode_serves(s)) return 0;
  const int64_t node = int64_t{tile_rows(s)} * vec_dim(s) * 6;  // float4 and float2 for each 4 dimensions
  return int64_t{groups_of(s)} * s.kv_heads * nodes_of_block(levels_of(s, kChunkLog2, short_row_of(s))) * node;
}

void run_decode(const Params& params, rk_stream stream) {
  Args a;
  a.p = params;
  a.group = params.group();
  a.groups = groups_of(params);
  a.chunk_log2 = kChunkLog2;
  a.short_row = short_row_of(params);
  a.levels = levels_of(params, kChunkLog2, a.short_row);
  if ((params.page_size & (params.page_size - 1)) == 0) a.page_shift = __builtin_ctz(params.page_size);
  a.k_strides = strides_of(params, params.k_page, params.k_token);
  a.v_strides = strides_of(params, params.v_page, params.v_token);
  a.nodes = static_cast<char*>(params.workspace);
  for (int64_t row = 0; row < params.batch; row += kMaxRows) {
    a.first_row = static_cast<int>(row);
    a.rows = static_cast<int>(std::min<int64_t>(kMaxRows, params.batch - row));
    if (params.kv_dtype == DType::f8e4m3) {
      launch<e4m3>(a, stream);
    } else if (params.dtype == DType::bf16) {
      launch<bf16>(a, stream);
    } else {
      launch<f16>(a, stream);
    }
  }
}

}  // namespace radix::attention
