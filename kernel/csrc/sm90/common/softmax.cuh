// The online softmax of scores as wgmma leaves them.
#pragma once

#include <climits>
#include <cstdint>

#include "sm90/common/math.cuh"

namespace radix::sm90 {

// The online softmax of a thread's two rows; a row is spread over the four threads of a quad. What can be done for both
// rows side by side is, so that one's latencies hide under the other's.
struct Softmax {
  float row_max[2] = {-INFINITY, -INFINITY};  // largest score so far, nearly
  float base[2];                              // row_max * scale - raise; 0 before the first score
  float row_sum[2] = {0, 0};                  // of this thread's probabilities
  float rescale[2];                           // factor of what was summed before the last raise_max()
  int limit = INT_MIN;                        // scores whose bits are below this leave both maxima where they are

  // s becomes exp2((s - row_max) * scale + raise) once the maxima are updated. Returns whether one moved.
  template <bool kOften, int R>
  __device__ bool step(float (&s)[R], float scale, float raise, float slack) {
    const bool moved = update_max<kOften>(s, scale, raise, slack);
    float partial[2][2] = {{0, 0}, {0, 0}};
#pragma unroll
    for (int i = 0; i < R; i += 4)
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = s[i + 2 * r + e];
          x = probability(x, r, scale);
          partial[r][e] += x;
        }
#pragma unroll
    for (int r = 0; r < 2; r++) row_sum[r] += partial[r][0] + partial[r][1];
    return moved;
  }

  // A maximum stays where it would grow by no more than `slack`, so probabilities come out up to 2^(raise + slack).
  // With much slack all maxima of the warp stay in most steps: then one comparison is all there is to do; kOften: that
  // would not pay. Returns whether one moved: then what was summed up so far shrinks.
  template <bool kOften, int R>
  __device__ bool update_max(const float (&s)[R], float scale, float raise, float slack) {
    bool moved;
    if constexpr (kOften) {
      raise_max(s, scale, raise, slack);
      moved = __any_sync(~0u, rescale[0] != 1.f || rescale[1] != 1.f);
    } else {
      moved = __any_sync(~0u, bits_of_largest(s) >= limit);
      if (__builtin_expect(moved, 0)) raise_max(s, scale, raise, slack);
    }
    return moved;
  }

  // The probability of a score of row r, relative to its present maximum.
  __device__ float probability(float s, int r, float scale) const { return exp2_approx(fmaf(s, scale, -base[r])); }

 private:
  // Floats that are not negative compare like integers, of which one instruction takes three; the order of negative
  // ones is the reverse. Of both rows together:
  template <int R>
  __device__ static int bits_of_largest(const float (&s)[R]) {
    int most[4] = {INT_MIN, INT_MIN, INT_MIN, INT_MIN};
#pragma unroll
    for (int i = 0; i < R; i += 2)
      most[i / 2 % 4] = __vimax3_s32(most[i / 2 % 4], __float_as_int(s[i]), __float_as_int(s[i + 1]));
    return max(__vimax3_s32(most[0], most[1], most[2]), most[3]);
  }
  // Of each row, whatever its sign.
  template <int R>
  __device__ static void largest(const float (&s)[R], float (&out)[2]) {
    int most[2][2] = {{INT_MIN, INT_MIN}, {INT_MIN, INT_MIN}};
#pragma unroll
    for (int i = 0; i < R; i += 4)
#pragma unroll
      for (int r = 0; r < 2; r++)
        most[r][i / 4 % 2] =
            __vimax3_s32(most[r][i / 4 % 2], __float_as_int(s[i + 2 * r]), __float_as_int(s[i + 2 * r + 1]));
    int bits[2] = {max(most[0][0], most[0][1]), max(most[1][0], most[1][1])};
    if ((bits[0] | bits[1]) < 0) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        unsigned least = UINT_MAX;
#pragma unroll
        for (int i = 0; i < R; i += 4)
          least = __vimin3_u32(least, __float_as_uint(s[i + 2 * r]), __float_as_uint(s[i + 2 * r + 1]));
        if (bits[r] < 0) bits[r] = least;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) out[r] = __int_as_float(bits[r]);
  }

  // Each row decides for itself, so that its bits do not depend on its neighbours.
  template <int R>
  __device__ void raise_max(const float (&s)[R], float scale, float raise, float slack) {
    float t[2];
    largest(s, t);
#pragma unroll
    for (int r = 0; r < 2; r++) t[r] = fmaxf(row_max[r], t[r]);
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2)
#pragma unroll
      for (int r = 0; r < 2; r++) t[r] = fmaxf(t[r], __shfl_xor_sync(~0u, t[r], lanes));
#pragma unroll
    for (int r = 0; r < 2; r++) {
      if ((t[r] - row_max[r]) * scale <= slack) t[r] = row_max[r];
      base[r] = t[r] == -INFINITY ? 0.f : t[r] * scale - raise;
      rescale[r] =
          t[r] == row_max[r] ? 1.f : exp2_approx((row_max[r] - t[r]) * scale);  // exactly 1 where the maximum stays
      row_sum[r] *= rescale[r];
      row_max[r] = t[r];
    }
    // Less than what the test above lets pass, however either is rounded.
    const float least = fminf(row_max[0], row_max[1]) + __fdividef(0.99f * slack, scale);
    limit = least >= 0 ? __float_as_int(least) : INT_MIN;
  }
};

}  // namespace radix::sm90
