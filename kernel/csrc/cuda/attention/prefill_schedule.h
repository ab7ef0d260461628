// The order of prefill's tiles, computed by each block for itself.
//
// Tiles of a row are counted from its end: level 0 is the last tile of every row, which sees the most keys under a
// causal mask. The order is level by level, within a level row by row, within a row head by head: nearly longest first,
// and blocks that run at the same time share their keys in L2. Where the keys of all heads do not fit in L2, heads go
// in sections, one after the other.
#pragma once

#include "cuda/attention/prefill.h"

namespace radix::attention::prefill {

constexpr int64_t kSectionBytes = 32 << 20;  // keys and values of the rows, for the heads of one section

// Used by all lanes of one warp together; tiles are asked for in growing order.
class Schedule {
 public:
  __device__ Schedule(const Args& args, int element_bytes) : a_(args), lane_(threadIdx.x % 32) {
    int tiles = 0;
    int64_t keys = 0;
    for (int row = lane_; row < a_.p.batch; row += 32) {
      tiles += tiles_of(row);
      keys += kv_len(row);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      tiles += __shfl_xor_sync(~0u, tiles, step);
      keys += __shfl_xor_sync(~0u, keys, step);
    }
    tiles_ = tiles;
    const int64_t head_bytes = max(keys, int64_t{1}) * (a_.p.head_dim + a_.p.v_dim) * element_bytes;
    section_ = static_cast<int>(min(int64_t{a_.p.kv_heads}, max(int64_t{1}, kSectionBytes / head_bytes)));
  }

  __device__ int total() const { return tiles_ * a_.p.kv_heads; }

  // The tile at place `at` < total().
  template <int kBlockN>
  __device__ Tile tile(int at) {
    const int in_section = tiles_ * section_, section = at / in_section;
    if (section != at_section_) at_section_ = section, level_ = 0, before_ = 0, count_ = -1;
    const int heads = min(section_, a_.p.kv_heads - section * section_);
    const int rest = at - section * in_section, place = rest / heads;
    if (count_ < 0) count_ = rows_with(level_);
    while (place >= before_ + count_) before_ += count_, count_ = rows_with(++level_);
    Tile t;
    t.row = find(place - before_);
    t.kv_head = section * section_ + rest % heads;
    t.q_begin = a_.p.cu_q[t.row];
    t.q_len = a_.p.cu_q[t.row + 1] - t.q_begin;
    t.kv_len = kv_len(t.row);
    t.kv_begin = a_.p.cu_k ? a_.p.cu_k[t.row] : 0;
    t.first = (tiles_of(t.row) - 1 - level_) * a_.tokens_per_step;
    const int offset = t.kv_len - t.q_len;  // position of query token 0
    const int last = offset + min(t.q_len, t.first + a_.tokens_per_step) - 1;
    const int end = a_.p.causal ? min(t.kv_len, last + 1) : t.kv_len;
    const int begin = a_.p.window_left >= 0 ? max(0, offset + t.first - a_.p.window_left) : 0;
    t.n_begin = begin / kBlockN;
    t.n_end = end > begin ? (end + kBlockN - 1) / kBlockN : t.n_begin;
    return t;
  }

 private:
  __device__ int kv_len(int row) const {
    return a_.p.cu_k ? a_.p.cu_k[row + 1] - a_.p.cu_k[row] : max(a_.p.kv_lens[row], 0);
  }
  __device__ int tiles_of(int row) const {
    return (a_.p.cu_q[row + 1] - a_.p.cu_q[row] + a_.tokens_per_step - 1) / a_.tokens_per_step;
  }
  // Rows that have a tile at this level.
  __device__ int rows_with(int level) const {
    int count = 0;
    for (int base = 0; base < a_.p.batch; base += 32)
      count += __popc(__ballot_sync(~0u, base + lane_ < a_.p.batch && tiles_of(base + lane_) > level));
    return count;
  }
  // The k-th of them.
  __device__ int find(int k) const {
    for (int base = 0;; base += 32) {
      const unsigned has = __ballot_sync(~0u, base + lane_ < a_.p.batch && tiles_of(base + lane_) > level_);
      const int count = __popc(has);
      if (k < count) return base + static_cast<int>(__fns(has, 0, k + 1));
      k -= count;
    }
  }

  const Args& a_;
  int lane_;
  int tiles_ = 0;    // of one head
  int section_ = 1;  // heads of a section
  int at_section_ = -1, level_ = 0, before_ = 0, count_ = -1;
};

}  // namespace radix::attention::prefill
