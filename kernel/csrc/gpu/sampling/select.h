// Picking from one row without sorting it, by one block: the ids before a border in the order (value descending, id
// ascending).
//
// The scan has left the largest of each group of 128 ids. The k-th largest of those is at most the k-th largest of the
// row, so a histogram of them gives a border behind which only a few groups reach, and only those are read again: a few
// dozen ids to sort. Where the border lies too deep (a large k) the row is read again as often as a search by
// histograms of words (value, id) needs: twice, or four times when many values are equal.
#pragma once

#include "gpu/device/reduce.h"
#include "gpu/sampling/draw.h"

namespace radix::gpu {

constexpr int kSelectThreads = 512;
constexpr int kSelectParts = kSelectThreads / kLanes;
constexpr int kBinBits = 10, kBins = 1 << kBinBits;
constexpr int kCapacity = 2048;    // words that can be sorted
constexpr int kMostGroups = 1024;  // groups that are read again before a search is better
constexpr int kInFlight = 4;       // groups a part reads at a time

struct Selection {
  uint64_t words[kCapacity];
  uint32_t number[kBins];  // of words in each bin
  int32_t groups[kMostGroups];
  int count;        // of words or groups; may pass their capacity
  int border;       // last bin that gather() looked at
  int bin, before;  // find_bin's results
  unsigned long long best, least, most;
};

// Bins of falling value: 0 holds the largest.
struct Ruler {
  float largest, scale;

  __device__ static Ruler of(float largest, float range) { return {largest, kBins / fmaxf(range, 1e-30f)}; }
  __device__ int bin(float x) const { return static_cast<int>(fminf((largest - x) * scale, kBins - 1)); }
};

constexpr int kSelectWarps = kSelectThreads / RK_WARP;

// Every thread gets the result. As block_reduce(), in fewer instructions: what they cost here is being fetched.
template <class T, class Op>
__device__ inline T reduce_block(T value, Op op) {
  __shared__ T part[kSelectWarps];
  value = warp_reduce(value, op);
  if (threadIdx.x % RK_WARP == 0) part[threadIdx.x / RK_WARP] = value;
  __syncthreads();
  value = reduce_lanes<kSelectWarps / 2>(part[threadIdx.x % kSelectWarps], op);
  __syncthreads();  // part is free again
  return value;
}

// The sum over the threads before this one; `total` becomes that over all.
template <class T>
__device__ T sum_before(T value, T* total) {
  __shared__ T part[kSelectWarps];
  const int lane = threadIdx.x % RK_WARP, warp = threadIdx.x / RK_WARP;
  T inclusive = value;
#pragma unroll
  for (int step = 1; step < RK_WARP; step <<= 1) {
    const T other = shuffle_up(inclusive, step);
    if (lane >= step) inclusive += other;
  }
  if (lane == RK_WARP - 1) part[warp] = inclusive;
  __syncthreads();
  T before = inclusive - value, all = 0;
#pragma unroll 1
  for (int w = 0; w < kSelectWarps; w++) {
    if (w < warp) before += part[w];
    all += part[w];
  }
  *total = all;
  __syncthreads();
  return before;
}

// ------------------------------------------------------------------ reading

// Groups of a row: the listed ones, or all `count` without a list.
struct Groups {
  const int32_t* list;
  int64_t count;
};

// Calls fn(id of the first, logit[4]) for the quads of the groups; edited logits, -inf past the row. Ids count from
// first_id.
template <bool kEdits, class Fn>
__device__ RK_INLINE void visit_logits(const Row<kEdits>& row, const Groups& groups, uint32_t first_id, const Fn& fn) {
  constexpr int kTogether = kEdits ? kInFlight / 2 : kInFlight;  // edits take registers
  const int32_t* list = groups.list;
  const int64_t count = groups.count;
  for (int64_t at = threadIdx.x / kLanes * kTogether; at < count; at += kSelectParts * kTogether) {
    Quad v[kTogether][1];
    int64_t group[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      group[j] = at + j < count ? (list ? list[at + j] : at + j) : row.groups();
      row.template load<1>(group[j], v[j]);
    }
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      if (at + j >= count) break;
      row.template edit<1>(group[j], v[j]);
      fn(first_id + static_cast<uint32_t>(group[j] * kGroup + threadIdx.x % kLanes * 4), v[j][0].at);
    }
  }
}

// The same of x = logit / temperature.
template <bool kEdits, class Fn>
__device__ RK_INLINE void visit_quads(const Row<kEdits>& row, const Groups& groups, uint32_t first_id, const Fn& fn) {
  visit_logits(row, groups, first_id, [&](uint32_t id, const float(&logits)[4]) {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = logits[i] / row.temperature;
    fn(id, x);
  });
}

// ------------------------------------------------------------------ histograms

__device__ inline void clear_bins(Selection& s) {
  __syncthreads();
  for (int i = threadIdx.x; i < kBins; i += kSelectThreads) s.number[i] = 0;
  __syncthreads();
}

// Sets s.bin to that in which the number of words reaches the limit, the last where it never does, and s.before to the
// number in the bins before it. Returns whether it was reached.
__device__ inline bool find_bin(Selection& s, int limit) {
  constexpr int kEach = kBins / kSelectThreads;
  __syncthreads();
  int number[kEach], sum = 0, total;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    number[i] = static_cast<int>(s.number[threadIdx.x * kEach + i]);
    sum += number[i];
  }
  int before = sum_before(sum, &total);
  const bool reached = total >= limit;
  if (!reached && threadIdx.x == kSelectThreads - 1) {
    s.bin = kBins - 1;
    s.before = total - number[kEach - 1];
  }
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    if (reached && before < limit && before + number[i] >= limit) {
      s.bin = threadIdx.x * kEach + i;
      s.before = before;
    }
    before += number[i];
  }
  __syncthreads();
  return reached;
}

// ------------------------------------------------------------------ lists

// Appends; what does not fit is only counted.
__device__ inline void append(Selection& s, uint64_t word) {
  const int at = atomicAdd(&s.count, 1);
  if (at < kCapacity) s.words[at] = word;
}

__device__ inline void clear_list(Selection& s) {
  __syncthreads();
  if (threadIdx.x == 0) s.count = 0;
  __syncthreads();
}

// Sorts words[0, count) in falling order (bitonic); words are distinct and not 0.
__device__ inline void sort_words(Selection& s, int count) {
  int size = 2;
  while (size < count) size *= 2;
  __syncthreads();
  for (int i = count + threadIdx.x; i < size; i += kSelectThreads) s.words[i] = 0;
  for (int run = 2; run <= size; run *= 2) {
    for (int step = run / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < size / 2; i += kSelectThreads) {
        const int a = i / step * 2 * step + i % step, b = a + step;
        const bool falling = (a & run) == 0;
        const uint64_t x = s.words[a], y = s.words[b];
        if ((x < y) == falling) {
          s.words[a] = y;
          s.words[b] = x;
        }
      }
    }
  }
  __syncthreads();
}

// ------------------------------------------------------------------ sweeps

// What one pass over (part of) a row does with the words that it accepts.
struct Sweep {
  enum class Action { bins_by_value, bins_by_word, list, extent } action;
  Ruler ruler;
  int first_bin = 0, last_bin = kBins - 1;  // accepted, by the ruler
  uint64_t low = 0, high = UINT64_MAX;      // accepted words
  bool masked = false;                      // accept x = -inf
  int shift = 0;                            // bins_by_word: bin = (high - word) >> shift
  Groups groups{nullptr, 0};                // without a list all

  __device__ bool accepts(uint64_t word, float x) const {
    const int bin = ruler.bin(x);
    return bin >= first_bin && bin <= last_bin && word >= low && word <= high;
  }
};

// Bins: into s.number, cleared before. List: into s.words and s.count. Extent: the least and the largest word into
// s.least and s.most. One function for all, called: a dozen copies of its loop would be the largest part of the
// library.
template <bool kEdits>
__device__ RK_CALLED void sweep(Selection& s, const Row<kEdits>& row, uint32_t first_id, const Sweep& task) {
  using Action = Sweep::Action;
  if (task.action == Action::list) {
    clear_list(s);
  } else if (task.action != Action::extent) {
    clear_bins(s);
  }
  uint64_t least = UINT64_MAX, most = 0;
  const Groups groups = task.groups.list ? task.groups : Groups{nullptr, row.groups()};
  visit_quads(row, groups, first_id, [&](uint32_t first, const float(&values)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t id = first + i;
      const float x = values[i];
      if (!(x > -INFINITY) && !(task.masked && x == -INFINITY && id - first_id < row.columns)) continue;
      const uint64_t word = order_word(x, id);
      if (!task.accepts(word, x)) continue;
      switch (task.action) {
        case Action::bins_by_value: atomicAdd(&s.number[task.ruler.bin(x)], 1u); break;
        case Action::bins_by_word: atomicAdd(&s.number[(task.high - word) >> task.shift], 1u); break;
        case Action::list: append(s, word); break;
        case Action::extent:
          least = word < least ? word : least;
          most = word > most ? word : most;
          break;
      }
    }
  });
  __syncthreads();
  if (task.action != Action::extent) return;
  least = ~reduce_block(~least, MaxWord());
  most = reduce_block(most, MaxWord());
  if (threadIdx.x == 0) {
    s.least = least;
    s.most = most;
  }
  __syncthreads();
}

// ------------------------------------------------------------------ the quick way: by the groups' largest

// The groups' largest as the select functions see them: in units of the row's x.
struct Tops {
  const float* largest;
  int64_t groups;
  float temperature;
  __device__ float operator[](int64_t g) const { return largest[g] / temperature; }
};

// A ruler from the largest of the row to the least of its groups.
__device__ inline Ruler ruler_of(const Tops& tops, float largest) {
  float least = largest;
  for (int64_t g = threadIdx.x; g < tops.groups; g += kSelectThreads) {
    const float x = tops[g];
    if (x > -INFINITY) least = fminf(least, x);
  }
  least = -reduce_block(-least, Max());
  return Ruler::of(largest, largest - least);
}

// Fills the list with the words of all ids at or before a border that `deepest` bins and `number` of the groups'
// largest give, and sorts it. Returns how many, or -1 when there is no room for them.
template <bool kEdits>
__device__ RK_CALLED int gather(Selection& s, const Row<kEdits>& row, const Tops& tops, const Ruler& ruler,
                                uint32_t first_id, int number, int deepest) {
  clear_bins(s);
  for (int64_t g = threadIdx.x; g < tops.groups; g += kSelectThreads) {
    const float x = tops[g];
    if (x > -INFINITY) atomicAdd(&s.number[ruler.bin(x)], 1u);
  }
  find_bin(s, number);
  const int border = min(s.bin, deepest);
  clear_list(s);
  for (int64_t g = threadIdx.x; g < tops.groups; g += kSelectThreads) {
    const float x = tops[g];
    if (!(x > -INFINITY) || ruler.bin(x) > border) continue;
    const int at = atomicAdd(&s.count, 1);
    if (at < kMostGroups) s.groups[at] = static_cast<int32_t>(g);
  }
  __syncthreads();
  const int groups = s.count;
  if (groups > kMostGroups) return -1;
  Sweep task{Sweep::Action::list, ruler};
  task.last_bin = border;
  task.groups = {s.groups, groups};
  sweep(s, row, first_id, task);
  if (threadIdx.x == 0) s.border = border;
  const int count = s.count;
  if (count > kCapacity) return -1;
  sort_words(s, count);
  return count;
}

// ------------------------------------------------------------------ the sure way: a search over the row

// The last of the first `number` words that `task` accepts; 0 when there are no more than those.
template <bool kEdits>
__device__ uint64_t find_border(Selection& s, const Row<kEdits>& row, uint32_t first_id, Sweep task, int number) {
  task.action = Sweep::Action::bins_by_value;
  sweep(s, row, first_id, task);
  if (!find_bin(s, number)) return 0;
  task.first_bin = task.last_bin = s.bin;
  int before = s.before;
  bool fits = s.number[s.bin] <= kCapacity;
  if (!fits) {  // from here on bins are of words, so that equal values part by their ids
    task.action = Sweep::Action::extent;
    sweep(s, row, first_id, task);
    task.low = s.least;
    task.high = s.most;
    task.action = Sweep::Action::bins_by_word;
  }
  while (!fits) {
    task.shift = 64 - __clzll(static_cast<long long>(task.high - task.low)) - kBinBits;
    if (task.shift < 0) task.shift = 0;
    sweep(s, row, first_id, task);
    find_bin(s, number - before);
    before += s.before;
    task.high -= static_cast<uint64_t>(s.bin) << task.shift;
    const uint64_t width = uint64_t{1} << task.shift;
    if (task.high - task.low >= width) task.low = task.high - width + 1;
    fits = s.number[s.bin] <= kCapacity;
  }
  task.action = Sweep::Action::list;
  sweep(s, row, first_id, task);
  sort_words(s, s.count);
  return s.words[number - before - 1];
}

}  // namespace radix::gpu
