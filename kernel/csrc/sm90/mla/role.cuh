// What the consumer warpgroups of the kernels on wgmma (decode_swap_qk_h16.cuh, decode_wgmma_h64.cuh) have in common.
#pragma once

#include "sm90/common/cp_async.cuh"
#include "sm90/common/wgmma_transposed.cuh"
#include "sm90/mla/combine.cuh"
#include "sm90/mla/producer.cuh"

namespace radix::mla {

using sm90::kOperand;

// The segment's query rows from `packed` on, `rows` of kRows, to q: kBlocks blocks of 64 dimensions. By kWarps warps,
// which synchronize behind it; the products that read the queries before are done.
template <class T, int kRows, int kWarps>
__device__ inline void load_queries(const WgmmaArgs& a, const Segment& s, int packed, int rows, int warp, int lane,
                                    char* q) {
  constexpr int kEach = kRows / kWarps;
  static_assert(kRows % kWarps == 0 && kEach <= 32, "a lane finds the run_start of each of its warp's rows");
  // A warp has rows warp, warp + kWarps, ...; lane i finds where the i-th lies.
  const int mine = warp + lane % kEach * kWarps, at = mine < rows ? packed + mine : 0;
  const int token = s.q_begin + at / a.group, head = at % a.group;
  const int64_t nope_of = token * a.p.q_token + head * a.p.q_head;
  const int64_t rope_of = token * a.rope_token + head * a.rope_head;
  const uint32_t to = sm90::shared_address(q);
#pragma unroll 4
  for (int i = 0; i < kEach; i++) {
    const int r = warp + i * kWarps;
    const T* nope = static_cast<const T*>(a.p.q) + __shfl_sync(~0u, nope_of, i);
    const T* rope = static_cast<const T*>(a.q_rope) + __shfl_sync(~0u, rope_of, i);
#pragma unroll
    for (int j = 0; j < 3; j++) {
      const int piece = j * 32 + lane;
      if (piece < kBlocks * 8)
        cp_async_16(to + swizzled_offset(r, piece, kRows * 128),
                    piece < 64 ? nope + piece * 8 : rope + (piece - 64) * 8, r < rows);
    }
  }
  sm90::cp_async_commit();
  sm90::cp_async_wait<0>();
  sm90::fence_async_shared();
}

// Zeros in place of what a page holds past the row's end, in the 256 dimensions of a side of a tile: a probability of 0
// does not silence a NaN. By a warpgroup, which synchronizes behind it.
__device__ inline void clear_tokens(char* tile, int side, int from, int thread) {
  const uint32_t half = sm90::shared_address(tile) + side * kLeftBlocks * kBlockBytes;
  for (int i = from * 8 + thread; i < kTile * 8; i += 128)
#pragma unroll
    for (int block = 0; block < kLeftBlocks; block++)
      sm90::store_shared_uint4(half + block * kBlockBytes + i * 16, make_uint4(0, 0, 0, 0));
  sm90::fence_async_shared();
}

}  // namespace radix::mla
