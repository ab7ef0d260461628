// Which algorithm and launch an all-reduce takes. Host code.
#pragma once

#include <algorithm>

#include "gpu/comm/peer_group.h"

namespace radix::gpu {

struct AllReducePlan {
  bool two_shot;
  int blocks, threads;
};

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Largest tensor in bytes that goes in one shot, by the number of ranks (docs/kernels/all_reduce.md).
inline int64_t one_shot_bytes(int world_size) {
  switch (world_size) {
    case 2: return 1 << 20;
    case 4: return 256 << 10;
    default: return 128 << 10;
  }
}

// algorithm, blocks and threads of the caller come first; 0 asks for ours: the smallest blocks of which 64 do, a thread
// for each place in one shot and for every second place of a share in two.
inline AllReducePlan plan_all_reduce(int world_size, int64_t bytes, int algorithm, int blocks, int threads) {
  const bool two_shot = algorithm ? algorithm == RK_ALL_REDUCE_TWO_SHOT : bytes > one_shot_bytes(world_size);
  const int64_t words = ceil_div(bytes, 16), wanted = two_shot ? ceil_div(words, 2 * world_size) : words;
  if (!threads) threads = wanted <= 64 * 128 ? 128 : wanted <= 64 * 256 ? 256 : 512;
  if (!blocks) blocks = static_cast<int>(std::min<int64_t>(ceil_div(wanted, threads), kMaxChannels));
  return {two_shot, blocks, threads};
}

// That of the all-reduce with the norm, whose blocks take whole rows. most_rows: of a block at most; 0: none fits.
struct AllReduceNormPlan {
  bool two_shot;
  int64_t most_rows;
};

// Rows of row_words through channels with sides of `side` words. One shot takes world_size places of a channel for one
// of a row, two shots take two and round shares up; where a row does not fit our choice, it may fit the other.
inline AllReduceNormPlan plan_all_reduce_norm(int world_size, int64_t rows, int64_t row_words, int64_t side,
                                              int algorithm) {
  const int64_t most_one_shot = side / world_size / row_words, most_two_shot = (side / 2 - world_size) / row_words;
  bool two_shot = algorithm ? algorithm == RK_ALL_REDUCE_TWO_SHOT : rows * row_words * 16 > one_shot_bytes(world_size);
  if (!algorithm && (two_shot ? most_two_shot : most_one_shot) < 1) two_shot = !two_shot;
  return {two_shot, two_shot ? most_two_shot : most_one_shot};
}

// Calls fn(World<N>{}).
template <int N>
struct World {
  static constexpr int value = N;
};
template <class Fn>
void dispatch_world(int world_size, const Fn& fn) {
  switch (world_size) {
    case 2: return fn(World<2>{});
    case 4: return fn(World<4>{});
    default: return fn(World<8>{});
  }
}

// How places are cut: blocks of `per_block`.
struct Cut {
  int per_block;
  unsigned blocks;
};

// Runs fn(first byte, bytes, cut) over pieces of n bytes that the channels hold, `bytes` a place. `copies`: places of a
// channel that a place of the tensor needs; `unit`: blocks hold multiples of it. blocks 0: one for each 512 places.
template <class Fn>
void for_pieces(const rk_gpu_comm& comm, int64_t n, int bytes, int64_t blocks, int copies, int unit, const Fn& fn) {
  const int64_t most = comm.view().side / copies / unit * unit, step = most * kMaxChannels * bytes;
  for (int64_t first = 0; first < n; first += step) {
    const int64_t size = std::min(step, n - first), places = ceil_div(size, bytes);
    const int64_t wanted = std::min<int64_t>(blocks ? blocks : ceil_div(places, 512), kMaxChannels);
    const int64_t count = std::max(wanted, ceil_div(places, most));
    const int64_t per_block = std::min(ceil_div(ceil_div(places, count), unit) * unit, most);
    fn(first, size, Cut{static_cast<int>(per_block), static_cast<unsigned>(ceil_div(places, per_block))});
  }
}

}  // namespace radix::gpu
