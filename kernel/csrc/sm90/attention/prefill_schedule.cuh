// The order of prefill's tiles, computed by each block for itself.
//
// Tiles of a row are counted from its end: level 0 is the last tile of every row, which sees the most keys under a
// causal mask. The order is level by level, within a level row by row, within a row head by head: nearly longest first,
// and blocks that run at the same time share their keys in L2. Where the keys of all heads do not fit in L2, heads go
// in sections, one after the other.
#pragma once

#include <climits>

#include "sm90/attention/prefill.cuh"

namespace radix::attention::prefill {

constexpr int64_t kSectionBytes = 32 << 20;  // keys and values of the rows, for the heads of one section

// Used by all lanes of one warp together; tiles are asked for in growing order.
class Schedule {
 public:
  __device__ Schedule(const Args& args, int element_bytes, int block, int blocks)
      : a_(args), lane_(threadIdx.x % 32), block_(block), blocks_(blocks) {
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
    choose_section(static_cast<int>(min(int64_t{a_.p.kv_heads}, max(int64_t{1}, kSectionBytes / head_bytes))));
  }

  // The next tile of this block or cluster; its row is -1 where there are no more. Rounds go there and back over the
  // blocks, so that none has the longer tile each time.
  template <int kBlockN>
  __device__ Tile next() {
    Tile t{};
    t.row = -1;
    if (tiles_ == 0) return t;
    const int rounds = rounds_of(section_);
    int section, heads, rest;
    do {
      section = round_ / rounds;
      if (section * section_ >= a_.p.kv_heads) return t;
      heads = min(section_, a_.p.kv_heads - section * section_);
      rest = (round_ - section * rounds) * blocks_ + (round_ % 2 ? blocks_ - 1 - block_ : block_);
      round_++;
    } while (rest >= tiles_ * heads);
    if (section != at_section_) at_section_ = section, level_ = 0, before_ = 0, count_ = -1;
    const int place = rest / heads;
    if (count_ < 0) count_ = rows_with(level_);
    while (place >= before_ + count_) before_ += count_, count_ = rows_with(++level_);
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
  // Each section begins with a round of its own: none deals the shortest tiles of one with the longest of the next. Of
  // the sizes that fit in L2 the one with the fewest rounds, the largest of those; all heads together where sections
  // take a sixteenth more rounds.
  __device__ void choose_section(int most) {
    const int all = a_.p.kv_heads;
    int best = rounds_of(all) + rounds_of(all) / 16;
    section_ = all;
    for (int base = 1; base <= most; base += 32) {
      const int size = base + lane_;
      const int rounds = size <= most ? all / size * rounds_of(size) + rounds_of(all % size) : INT_MAX;
      const int least = __reduce_min_sync(~0u, rounds);
      if (least > best) continue;
      best = least;
      section_ = base + 31 - __clz(__ballot_sync(~0u, rounds == least));
    }
  }
  __device__ int rounds_of(int heads) const { return (tiles_ * heads + blocks_ - 1) / blocks_; }

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
  int lane_, block_, blocks_, round_ = 0;
  int tiles_ = 0;    // of one head
  int section_ = 1;  // heads of a section
  int at_section_ = -1, level_ = 0, before_ = 0, count_ = -1;
};

}  // namespace radix::attention::prefill
