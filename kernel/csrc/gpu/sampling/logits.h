// Rows of logits as the sampling kernels read them: in groups of 128 ids, four ids a lane of 32 lanes, with the edits
// that come before temperature applied on the way.
#pragma once

#include "common/tensor.h"
#include "gpu/device/element.h"

namespace radix::gpu {

// A kernel's parameters stay where they are when their address is taken. And functions that are called, not copied; on
// AMD all is copied, since a call would need a stack.
#if defined(__HIP__)
#define RK_PARAMETER
#define RK_INLINE __attribute__((always_inline)) inline
#define RK_CALLED RK_INLINE
#else
#define RK_PARAMETER __grid_constant__
#define RK_INLINE inline
#define RK_CALLED inline __noinline__
#endif

constexpr int kLanes = 32;              // that share a group, whatever the width of a warp
constexpr int kGroup = kLanes * 4;      // ids
constexpr int32_t kInPrompt = 1 << 30;  // in a word of counts
constexpr float kLog2e = 1.442695041f, kLn2 = 0.693147181f;

using Quad = Pack<float, 4>;

// q.at[i] of a quad in registers.
__device__ inline float pick(const Quad& q, int i) {
  const float low = i & 1 ? q.at[1] : q.at[0], high = i & 1 ? q.at[3] : q.at[2];
  return i & 2 ? high : low;
}

// A quad that the caches need not keep.
__device__ inline Quad load_once(const float* p) {
#if defined(__HIP__)
  return load_pack<4>(p);
#else
  const float4 q = __ldcs(reinterpret_cast<const float4*>(p));
  return {{q.x, q.y, q.z, q.w}};
#endif
}

struct Matrix {
  char* data = nullptr;
  int64_t stride = 0, rows = 0, columns = 0;  // stride in elements

  Matrix() = default;
  explicit Matrix(const rk_tensor& t)
      : data(data_ptr<char>(t)), stride(t.strides[0]), rows(t.shape[0]), columns(t.shape[1]) {}
  template <class T>
  __device__ T* row(int64_t i) const {
    return reinterpret_cast<T*>(data) + i * stride;
  }
};

// A lane's value within its 32.
template <class T>
__device__ inline T shuffle_from(T value, int lane) {
#if defined(__HIP__)
  return __shfl(value, lane, kLanes);
#else
  return __shfl_sync(0xffffffffu, value, lane, kLanes);
#endif
}

// The larger; NaN when either is NaN, so that a NaN anywhere in a row reaches the row's largest.
struct MaxOrNan {
  __device__ float operator()(float a, float b) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
#else
    return b > a || b != b ? b : a;
#endif
  }
};

__device__ inline float fast_exp2(float x) {
#if defined(__HIP__)
  return __builtin_amdgcn_exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}
__device__ inline float fast_log2(float x) {
#if defined(__HIP__)
  return __builtin_amdgcn_logf(x);
#else
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// The edits, as device pointers; NULL leaves a step out. Meaning: radix_kernels/sampling.h.
struct Edits {
  const int32_t* bias_ids = nullptr;
  const float* bias_values = nullptr;
  int64_t bias_count = 0;
  Matrix counts;
  const int32_t* slots = nullptr;
  const float *repetition = nullptr, *frequency = nullptr, *presence = nullptr;
  const int32_t* stop_ids = nullptr;
  int64_t stop_count = 0;
  const int64_t* min_position = nullptr;
  const int64_t* position = nullptr;
  int64_t first_id = 0;  // of the row; ids of lists count from 0
  const uint32_t* bitmask = nullptr;
  int64_t bitmask_stride = 0;
};

__device__ inline float penalised(float x, int32_t word, float repetition, float frequency, float presence) {
  if (word == 0) return x;
  float y = x > 0 ? x / repetition : x * repetition;
  const int32_t count = word & (kInPrompt - 1);
  if (count > 0) y -= frequency * static_cast<float>(count) + presence;
  return y;
}

// One row: pointers, and what its edits and its temperature are. Ids are those of the row's own columns.
template <bool kEdits>
struct Row {
  const float* data;
  int64_t index, columns;
  bool aligned;  // a quad is one access
  float temperature;
  const Edits& edits;

  __device__ Row(const Matrix& logits, int64_t index, float temperature, const Edits& edits)
      : data(logits.row<const float>(index)),
        index(index),
        columns(logits.columns),
        aligned(reinterpret_cast<uintptr_t>(data) % 16 == 0),
        temperature(temperature),
        edits(edits) {}

  __device__ int64_t groups() const { return (columns + kGroup - 1) / kGroup; }

  // The lane's quads of kCount neighbouring groups; ids past the row are -inf. kOnce: they are not read again soon.
  template <int kCount, bool kOnce = false>
  __device__ void load(int64_t group, Quad (&v)[kCount]) const {
    const int64_t first = group * kGroup + threadIdx.x % kLanes * 4;
    if (aligned && (group + kCount) * kGroup <= columns) {
#pragma unroll
      for (int j = 0; j < kCount; j++) {
        const float* quad = data + first + j * kGroup;
        v[j] = kOnce ? load_once(quad) : load_pack<4>(quad);
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < kCount; j++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int64_t id = first + j * kGroup + i;
        v[j].at[i] = id < columns ? data[id] : -INFINITY;
      }
    }
  }

  // Applies the edits to what load() gave: bias, penalties, minimum of tokens, grammar.
  template <int kCount>
  __device__ RK_INLINE void edit(int64_t group, Quad (&v)[kCount]) const {
    if (!kEdits) return;
    if (edits.bias_ids) {
      for_each_listed<kCount>(edits.bias_ids, edits.bias_count, group, v,
                              [&](float x, int64_t at) { return x + edits.bias_values[at]; });
    }
    if (edits.slots) penalise<kCount>(group, v);
    if (edits.stop_ids && edits.position[index] < edits.min_position[index]) {
      for_each_listed<kCount>(edits.stop_ids, edits.stop_count, group, v, [](float, int64_t) { return -INFINITY; });
    }
    if (edits.bitmask) mask<kCount>(group, v);
  }

 private:
  // Calls x = fn(x, place in the list) for the ids of the row's list that lie in the lane's quads. A negative id ends
  // the list; what lies behind the row stays -inf, whatever would be added.
  template <int kCount, class Fn>
  __device__ RK_INLINE void for_each_listed(const int32_t* lists, int64_t count, int64_t group, Quad (&v)[kCount],
                                            const Fn& fn) const {
    const int64_t end = (index + 1) * count;
    for (int64_t at = index * count; at < end; at++) {
      const int32_t id = lists[at];
      if (id < 0) return;
      const int64_t own = id - edits.first_id, off = own - group * kGroup;
      if (off < 0 || off >= kCount * kGroup || own >= columns || off / 4 % kLanes != threadIdx.x % kLanes) continue;
#pragma unroll
      for (int j = 0; j < kCount; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (off / kGroup == j && off % 4 == i) v[j].at[i] = fn(v[j].at[i], at);
      }
    }
  }

  template <int kCount>
  __device__ RK_INLINE void penalise(int64_t group, Quad (&v)[kCount]) const {
    const int64_t slot = edits.slots[index];
    if (slot < 0 || slot >= edits.counts.rows) return;
    const int32_t* words = edits.counts.row<const int32_t>(slot);
    const float repetition = edits.repetition[index], frequency = edits.frequency[index];
    const float presence = edits.presence[index];
    const int64_t first = group * kGroup + threadIdx.x % kLanes * 4;
    const bool whole = reinterpret_cast<uintptr_t>(words) % 16 == 0 && (group + kCount) * kGroup <= columns;
#pragma unroll
    for (int j = 0; j < kCount; j++) {
      const int64_t id = first + j * kGroup;
      Pack<int32_t, 4> word;
      if (whole) {
        word = load_pack<4>(words + id);
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++) word.at[i] = id + i < columns ? words[id + i] : 0;
      }
#pragma unroll
      for (int i = 0; i < 4; i++) v[j].at[i] = penalised(v[j].at[i], word.at[i], repetition, frequency, presence);
    }
  }

  template <int kCount>
  __device__ RK_INLINE void mask(int64_t group, Quad (&v)[kCount]) const {
    const uint32_t* words = edits.bitmask + index * edits.bitmask_stride;
#pragma unroll
    for (int j = 0; j < kCount; j++) {
      const int64_t id = (group + j) * kGroup + threadIdx.x % kLanes * 4;
      if (id >= columns) continue;
      const uint32_t allowed = words[id / 32] >> (id % 32);
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (!(allowed >> i & 1u)) v[j].at[i] = -INFINITY;
    }
  }
};

}  // namespace radix::gpu
