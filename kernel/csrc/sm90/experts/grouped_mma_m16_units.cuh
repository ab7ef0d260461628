// The units of grouped_mma_m16: 128 bytes of 8 weight rows, their ring in shared memory, and their products.
#pragma once

#include "sm90/common/cp_async.cuh"
#include "sm90/common/mma_m16n8k16.cuh"
#include "sm90/experts/fp8_weights.cuh"
#include "sm90/experts/grouped_mma_m16_routing.cuh"

namespace radix::experts {

constexpr int kUnitBytes = 128;

// A warp's units in shared memory: [stage][row group][half][lane] of 16 bytes.
template <int kGroups, int kDepth>
class UnitRing {
  static_assert(kGroups == 1 || kGroups == 2, "a row group, or a gate group and its up group");
  static_assert(kDepth >= 2, "a unit is on its way while another is multiplied");

 public:
  static constexpr int kUnit = kGroups * 2 * 32;  // in pieces of 16 bytes
  static constexpr int kBytes = kMmaM16Warps * kDepth * kUnit * 16;

  __device__ explicit UnitRing(uint4* memory) : mine_(memory + threadIdx.x / 32 * kDepth * kUnit + threadIdx.x % 32) {}

  // The oldest unit; wait for it first.
  __device__ void wait() const { sm90::cp_async_wait<kDepth - 1>(); }
  // This lane's 16 bytes of a half of it.
  struct Unit {
    uint4 at[2];
  };
  __device__ Unit read(int group) const {
    const uint4* from = mine_ + (stage_ * kGroups + group) * 64;
    return {from[0], from[32]};
  }
  // Copies a unit over the oldest one, whose place the ring then leaves.
  __device__ void copy(int group, int half, const char* from, bool there) const {
    sm90::cp_async_16(sm90::shared_address(mine_ + ((stage_ * kGroups + group) * 2 + half) * 32), from, there);
  }
  __device__ void next() {
    sm90::cp_async_commit();
    if (++stage_ == kDepth) stage_ = 0;
  }

 private:
  uint4* mine_;
  int stage_ = 0;
};

// What a lane's bytes of a unit are multiplied with: the same elements of a row of x, in T, where the weight is of W.
template <class T, class W>
struct Pieces {
  static_assert(sizeof(T) == 2 && (sizeof(W) == 2 || sizeof(W) == 1), "16-bit tokens; weights alike, or FP8");
  static constexpr int kWide = sizeof(T) / sizeof(W);
  uint4 at[2][kWide];

  // From byte `at` of the weight's row; zeros for no row.
  __device__ void load(const char* row, int from, int k_bytes) {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int i = 0; i < kWide; i++)
        at[h][i] = row && from + h * 64 < k_bytes
                       ? *reinterpret_cast<const uint4*>(row + (from + h * 64) * kWide + i * 16)
                       : uint4{};
  }
};

// d += a * b for 16 tokens, 8 rows and 16 elements of k.
template <class T>
__device__ inline void multiply_add(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
  const uint32_t a[4] = {a0, a1, a2, a3};
  sm90::mma<T>(d, a, b0, b1);
}

template <class T, class W, class Unit>
__device__ inline void multiply_unit(float (&sum)[4], const Pieces<T, W>& low, const Pieces<T, W>& high,
                                     const Unit& weight, float scale) {
  if constexpr (__is_same(T, W)) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint4 &a = low.at[h][0], &b = high.at[h][0], &w = weight.at[h];
      multiply_add<T>(sum, a.x, b.x, a.y, b.y, w.x, w.y);
      multiply_add<T>(sum, a.z, b.z, a.w, b.w, w.z, w.w);
    }
  } else {
    float part[4] = {};
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t words[4] = {weight.at[h].x, weight.at[h].y, weight.at[h].z, weight.at[h].w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint4 &a = low.at[h][i / 2], &b = high.at[h][i / 2];
        const uint32_t w0 = sm90::widen_odd_e4m3<T>(__byte_perm(words[i], 0, 0x1404)),
                       w1 = sm90::widen_odd_e4m3<T>(__byte_perm(words[i], 0, 0x3424));
        i % 2 ? multiply_add<T>(part, a.z, b.z, a.w, b.w, w0, w1) : multiply_add<T>(part, a.x, b.x, a.y, b.y, w0, w1);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) sum[j] += scale * part[j];
  }
}

}  // namespace radix::experts
