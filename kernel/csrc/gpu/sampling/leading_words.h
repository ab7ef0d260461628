// The first words of a row when they are few: what most filters and all small top-N ask for. Little code, since a row's
// block runs it once and waits for its instructions longer than for its data.
#pragma once

#include "gpu/sampling/select.h"

namespace radix::gpu {

constexpr int kFew = kSelectThreads;  // words: one a thread
constexpr int kFewWanted = 256;
constexpr int kTopsEach = 4;  // groups' largest that a thread keeps: rows of up to 262,144 ids

__device__ inline int count_block(bool mine) {
#if defined(__HIP__)
  return reduce_block(static_cast<int>(mine), Sum());
#else
  return __syncthreads_count(mine);  // one barrier
#endif
}

// The groups' largest of a row, in the threads' registers.
class TopsHere {
 public:
  __device__ explicit TopsHere(const Tops& tops) : groups_(tops.groups) {
#pragma unroll
    for (int i = 0; i < kTopsEach; i++) {
      const int64_t g = threadIdx.x + i * kSelectThreads;
      top_[i] = g < tops.groups ? tops[g] : -INFINITY;
    }
  }
  __device__ bool fits() const { return groups_ <= kTopsEach * kSelectThreads; }

  // A border that at least `number` of them reach, and not many more, if there is one; -FLT_MAX when there are fewer.
  __device__ float border(float largest, int number) const {
    float low = largest;
#pragma unroll
    for (int i = 0; i < kTopsEach; i++)
      if (top_[i] > -INFINITY) low = fminf(low, top_[i]);
    low = -reduce_block(-low, Max());
    float high = largest, middle = low;
    const int most = number + number / 4 + 8;
    for (int step = 0; step < 25; step++) {
      const int count = count_from(middle);
      if (step == 0 && count <= number) return -FLT_MAX;
      if (count < number) {
        high = middle;
      } else {
        low = middle;
        if (count <= most) break;
      }
      middle = low + (high - low) / 2;
    }
    return low;
  }

  // Into s.groups those that reach the border; s.count of them, perhaps more than there is room for.
  __device__ void list(Selection& s, float border) const {
    clear_list(s);
#pragma unroll
    for (int i = 0; i < kTopsEach; i++) {
      if (!(top_[i] >= border) || top_[i] == -INFINITY) continue;
      const int at = atomicAdd(&s.count, 1);
      if (at < kMostGroups) s.groups[at] = static_cast<int32_t>(threadIdx.x + i * kSelectThreads);
    }
    __syncthreads();
  }

 private:
  __device__ int count_from(float border) const {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kTopsEach; i++)
      if (i * kSelectThreads < groups_) count += count_block(top_[i] >= border);
    return count;
  }

  float top_[kTopsEach];
  int64_t groups_;
};

// Puts s.words[0, count) in falling order, count <= kFew: each thread counts the words before its own.
__device__ inline void sort_few(Selection& s, int count) {
  const int i = threadIdx.x;
  const uint64_t mine = i < count ? s.words[i] : 0;
  int before = 0;
#pragma unroll 2
  for (int k = 0; k < count; k++) before += s.words[k] > mine;
  __syncthreads();
  if (i < count) s.words[before] = mine;
  __syncthreads();
}

// Fills the list with the words of all ids whose x reaches the border, sorted. Returns how many, -1 when they are not
// few.
template <bool kEdits>
__device__ int list_from(Selection& s, const Row<kEdits>& row, const TopsHere& tops, uint32_t first_id, float border) {
  tops.list(s, border);
  const int groups = s.count;
  if (groups > kFew) return -1;
  clear_list(s);
  for (int at = threadIdx.x / kLanes; at < groups; at += kSelectParts) {
    const int64_t group = s.groups[at];
    Quad v[1];
    row.template load<1>(group, v);
    row.template edit<1>(group, v);
    const uint32_t id = first_id + static_cast<uint32_t>(group * kGroup + threadIdx.x % kLanes * 4);
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
      const float x = pick(v[0], i) / row.temperature;
      if (x >= border && x > -INFINITY) append(s, order_word(x, id + i));
    }
  }
  __syncthreads();
  const int count = s.count;
  if (count > kFew) return -1;
  sort_few(s, count);
  return count;
}

}  // namespace radix::gpu
