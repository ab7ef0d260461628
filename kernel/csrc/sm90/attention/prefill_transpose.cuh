// FP8 values transposed: wgmma reads 8-bit operands along k alone, and k of the second product is the token.
//
// 16 tokens x 16 dimensions at a time, by ldmatrix with transposition (of pairs of bytes), a permutation of bytes and
// stmatrix. Tokens and dimensions come out in the order in which accumulators hold them, so neither probabilities nor
// the output need to move between threads:
//   tokens      within 16: 0 1 8 9  2 3 10 11  4 5 12 13  6 7 14 15. A thread's probabilities of a row are those of the
//               tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9 and make one word of the A operand.
//   dimensions  within 16: 0 2 .. 14  1 3 .. 15. A thread's four outputs of a row are neighbours.
#pragma once

#include "sm90/attention/prefill_config.cuh"
#include "sm90/common/cluster.cuh"
#include "sm90/common/ldmatrix.cuh"

namespace radix::attention::prefill {

// Two warps of the producer's warpgroup, `half` 0 and 1: each turns every other block of 16 dimensions.
template <class C>
class Transposer {
 public:
  __device__ Transposer(Shared<C>& shared, int half) : shared_(shared), half_(half), lane_(threadIdx.x % 32) {}

  __device__ void transpose(const Tile& t) {
    for (int n = t.n_end - 1; n >= t.n_begin; n--) {
      barrier_wait(&shared_.v_full[at_.index], at_.parity);
      barrier_wait(&shared_.t_empty[to_.index], to_.parity ^ 1);
      const int valid = t.kv_len - n * C::kBlockN;
      valid < C::kBlockN ? transpose_block<true>(valid) : transpose_block<false>(valid);
      fence_async_shared();
      __syncwarp();
      barrier_arrive_warp(&shared_.t_full[to_.index]);
      barrier_arrive_warp(&shared_.v_empty[at_.index], C::kCluster);
      at_.next();
      to_.next();
    }
  }

 private:
  // Tokens from `valid` on become 0: what lies there may be NaN.
  template <bool kMask>
  __device__ void transpose_block(int valid) {
    const uint32_t from = shared_address(shared_.v[at_.index]) + lane_ * 128;
    const uint32_t to = shared_address(shared_.t[to_.index]) + lane_ % 16 * 128;
    const int in = lane_ % 8;
#pragma unroll 1
    for (int c = half_; c < C::kVDim / 16; c += 2) {
#pragma unroll
      for (int token = 0; token < C::kBlockN; token += 32) {
        uint32_t x[4];
        ldmatrix_x4_trans(x, from + token * 128 + ((c ^ in) << 4));
        uint32_t y[4];
#pragma unroll
        for (int i = 0; i < 4; i++) y[i] = __byte_perm(x[i / 2 * 2], x[i / 2 * 2 + 1], i % 2 ? 0x7531 : 0x6420);
        if (kMask) {
#pragma unroll
          for (int i = 0; i < 4; i++) y[i] &= kept(valid - token - i / 2 * 16);
        }
        const int chunk = token % 128 / 16 + lane_ / 16;
        stmatrix_x4(to + (token / 128 * C::kVDim + c * 16) * 128 + ((chunk ^ in) << 4), y[0], y[1], y[2], y[3]);
      }
    }
  }

  // Of this lane's tokens among 16, the bytes of those before `valid`.
  __device__ uint32_t kept(int valid) const {
    const int t = lane_ % 4 * 2;
    return (t < valid ? 0xffu : 0) | (t + 1 < valid ? 0xff00u : 0) | (t + 8 < valid ? 0xff0000u : 0) |
           (t + 9 < valid ? 0xff000000u : 0);
  }

  Shared<C>& shared_;
  int half_, lane_;
  Ring<C::kStages> at_;
  Ring<C::kTransposedStages> to_;
};

}  // namespace radix::attention::prefill
