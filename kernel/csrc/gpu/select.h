// Picking from one row without sorting it, by one block: the ids before a border in the order (value descending, id
// ascending).
//
// The scan has left the largest of each group of 128 ids. The k-th largest of those is at most the k-th largest of the
// row, so a histogram of them gives a border behind which only a few groups reach, and only those are read again: a few
// dozen ids to sort. Where the border lies too deep (a flat distribution, a large k) the row is read again as often as
// a search by histograms of words (value, id) needs: three times, or four when many values are equal. Weights are
// integers, so the order of additions does not matter.
#pragma once

#include "gpu/draw.h"
#include "gpu/reduce.h"

namespace radix::gpu {

constexpr int kSelectThreads = 512;
constexpr int kSelectParts = kSelectThreads / kLanes;
constexpr int kBinBits = 10, kBins = 1 << kBinBits;
constexpr int kCapacity = 2048;    // words that can be sorted
constexpr int kMostGroups = 1024;  // groups that are read again before a search is better
constexpr uint64_t kEnough = 680;  // groups that a mass may need before the row counts as flat
constexpr int kInFlight = 4;       // groups a part reads at a time

struct Selection {
  uint64_t words[kCapacity];
  uint32_t low[kBins], high[kBins], number[kBins];  // weight (64 bits) and number of words in each bin
  int32_t groups[kMostGroups];
  int count;   // of words or groups; may pass their capacity
  int border;  // last bin that gather() looked at
  int bin;     // find_bin's results
  unsigned long long before, best, least, most;
};

// Bins of falling value: 0 holds the largest.
struct Ruler {
  float largest, scale;

  __device__ static Ruler of(float largest, float range) { return {largest, kBins / fmaxf(range, 1e-30f)}; }
  __device__ int bin(float x) const { return static_cast<int>(fminf((largest - x) * scale, kBins - 1)); }
};

// exp(x - largest) in units of 2^-40.
__device__ inline uint64_t fixed_mass(float x, float largest) {
  return static_cast<uint64_t>(static_cast<double>(expf(x - largest)) * 0x1p40);
}

__device__ inline uint64_t limit_of_mass(float top_p, double total) {
  const double limit = ceil(static_cast<double>(top_p) * total);
  return limit < 1 ? 1 : static_cast<uint64_t>(limit);
}

constexpr int kSelectWarps = kSelectThreads / RK_WARP;

// Every thread gets the result. As block_reduce(), in fewer instructions: what they cost here is being fetched.
template <class T, class Op>
__device__ inline T reduce_block(T value, Op op) {
  __shared__ T part[kSelectWarps];
  value = warp_reduce(value, op);
  if (threadIdx.x % RK_WARP == 0) part[threadIdx.x / RK_WARP] = value;
  __syncthreads();
  value = part[threadIdx.x % kSelectWarps];
#pragma unroll
  for (int mask = kSelectWarps / 2; mask > 0; mask /= 2) value = op(value, shuffle_xor(value, mask));
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

// Calls fn(id of the first, x[4]) for the quads of groups list[0, count), or of all groups without a list; x = edited
// logit / temperature, -inf past the row. Ids count from first_id.
template <bool kEdits, class Fn>
__device__ RK_INLINE void visit_quads(const Row<kEdits>& row, const int32_t* list, int64_t count, uint32_t first_id,
                                      const Fn& fn) {
  for (int64_t at = threadIdx.x / kLanes * kInFlight; at < count; at += kSelectParts * kInFlight) {
    Quad v[kInFlight][1];
    int64_t group[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; j++) {
      group[j] = at + j < count ? (list ? list[at + j] : at + j) : row.groups();
      row.template load<1>(group[j], v[j]);
    }
#pragma unroll
    for (int j = 0; j < kInFlight; j++) {
      if (at + j >= count) break;
      row.template edit<1>(group[j], v[j]);
#pragma unroll
      for (int i = 0; i < 4; i++) v[j][0].at[i] /= row.temperature;
      fn(first_id + static_cast<uint32_t>(group[j] * kGroup + threadIdx.x % kLanes * 4), v[j][0].at);
    }
  }
}

// ------------------------------------------------------------------ histograms

__device__ inline void clear_bins(Selection& s) {
  __syncthreads();
  for (int i = threadIdx.x; i < kBins; i += kSelectThreads) s.low[i] = s.high[i] = s.number[i] = 0;
  __syncthreads();
}

__device__ inline void add_to_bin(Selection& s, int bin, uint64_t weight) {
  const auto low = static_cast<uint32_t>(weight);
  const uint32_t old = atomicAdd(&s.low[bin], low);
  const uint32_t high = static_cast<uint32_t>(weight >> 32) + (old + low < old ? 1u : 0u);
  if (high) atomicAdd(&s.high[bin], high);
  atomicAdd(&s.number[bin], 1u);
}

// Sets s.bin to that in which the sum of the bins' weights reaches the limit, the last where it never does, and
// s.before to the sum of the bins before it. limit_of(total weight). Returns whether it was reached.
template <class Limit>
__device__ bool find_bin(Selection& s, bool by_number, const Limit& limit_of) {
  constexpr int kEach = kBins / kSelectThreads;
  __syncthreads();
  uint64_t weight[kEach], sum = 0, total;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int bin = threadIdx.x * kEach + i;
    weight[i] = by_number ? s.number[bin] : uint64_t{s.high[bin]} << 32 | s.low[bin];
    sum += weight[i];
  }
  uint64_t before = sum_before(sum, &total);
  const uint64_t limit = limit_of(total);
  const bool reached = total >= limit;
  if (!reached && threadIdx.x == kSelectThreads - 1) {
    s.bin = kBins - 1;
    s.before = total - weight[kEach - 1];
  }
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    if (reached && before < limit && before + weight[i] >= limit) {
      s.bin = threadIdx.x * kEach + i;
      s.before = before;
    }
    before += weight[i];
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
  bool by_mass = false;                     // weights; else every word weighs 1
  bool masked = false;                      // accept x = -inf
  int shift = 0;                            // bins_by_word: bin = (high - word) >> shift
  const int32_t* groups = nullptr;          // NULL: all
  int64_t count = 0;                        // of groups

  // 0: not accepted.
  __device__ uint64_t weight(uint64_t word, float x) const {
    const int bin = ruler.bin(x);
    if (bin < first_bin || bin > last_bin || word < low || word > high) return 0;
    return by_mass ? fixed_mass(x, ruler.largest) : 1;
  }
};

// Bins: into s.low, s.high and s.number, cleared before. List: into s.words and s.count. Extent: the least and the
// largest word into s.least and s.most. One function for all, called: a dozen copies of its loop would be the largest
// part of the library.
template <bool kEdits>
__device__ RK_CALLED void sweep(Selection& s, const Row<kEdits>& row, uint32_t first_id, const Sweep& task) {
  using Action = Sweep::Action;
  if (task.action == Action::list) {
    clear_list(s);
  } else if (task.action != Action::extent) {
    clear_bins(s);
  }
  uint64_t least = UINT64_MAX, most = 0;
  const int64_t count = task.groups ? task.count : row.groups();
  visit_quads(row, task.groups, count, first_id, [&](uint32_t first, const float(&values)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t id = first + i;
      const float x = values[i];
      if (!(x > -INFINITY) && !(task.masked && x == -INFINITY && id - first_id < row.columns)) continue;
      const uint64_t word = order_word(x, id), weight = task.weight(word, x);
      if (weight == 0) continue;
      switch (task.action) {
        case Action::bins_by_value: add_to_bin(s, task.ruler.bin(x), weight); break;
        case Action::bins_by_word: add_to_bin(s, static_cast<int>((task.high - word) >> task.shift), weight); break;
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

// How deep the quick way looks: until `weight` of the groups' largest reaches the limit.
enum class Depth { number, mass };

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

// Fills the list with the words of all ids at or before a border that `deepest` bins and the groups' largest give, and
// sorts it. `limit`: a number of ids, or a mass of 2^-40. Returns how many, or -1 when there is no room for them.
// Whether they suffice is the caller's to see when `depth` is mass: the look ends early in a flat row.
template <bool kEdits>
__device__ RK_CALLED int gather(Selection& s, const Row<kEdits>& row, const Tops& tops, const Ruler& ruler,
                                uint32_t first_id, Depth depth, uint64_t limit, int deepest) {
  clear_bins(s);
  for (int64_t g = threadIdx.x; g < tops.groups; g += kSelectThreads) {
    const float x = tops[g];
    if (x > -INFINITY) add_to_bin(s, ruler.bin(x), depth == Depth::mass ? fixed_mass(x, ruler.largest) : 1);
  }
  find_bin(s, false, [&](uint64_t) { return limit; });
  int border = min(s.bin, deepest);
  if (depth == Depth::mass) {
    find_bin(s, true, [](uint64_t) { return kEnough; });
    border = min(border, s.bin);
  }
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
  task.groups = s.groups;
  task.count = groups;
  sweep(s, row, first_id, task);
  if (threadIdx.x == 0) s.border = border;
  const int count = s.count;
  if (count > kCapacity) return -1;
  sort_words(s, count);
  return count;
}

// ------------------------------------------------------------------ the sure way: a search over the row

// The sorted word at which the weight, `before` that of all words before the list, reaches the limit; the last word
// where rounding keeps it from that.
__device__ inline uint64_t border_in_list(Selection& s, const Sweep& task, uint64_t before, uint64_t limit) {
  constexpr int kEach = kCapacity / kSelectThreads;
  uint64_t mine[kEach], sum = 0, total;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int at = threadIdx.x * kEach + i;
    mine[i] = at < s.count ? task.weight(s.words[at], value_of(s.words[at])) : 0;
    sum += mine[i];
  }
  before += sum_before(sum, &total);
  if (threadIdx.x == 0) s.bin = s.count - 1;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    if (mine[i] && before < limit && before + mine[i] >= limit) s.bin = threadIdx.x * kEach + i;
    before += mine[i];
  }
  __syncthreads();
  return s.words[s.bin];
}

// The last word that stays when ids stay while the weight of those before them is below a limit; 0 when all stay.
// `task` says which words take part and what they weigh. The limit is a number, or with `fraction` that part of all
// weight.
template <bool kEdits>
__device__ uint64_t find_border(Selection& s, const Row<kEdits>& row, uint32_t first_id, Sweep task, uint64_t limit,
                                float fraction = 0) {
  task.action = Sweep::Action::bins_by_value;
  sweep(s, row, first_id, task);
  const auto limit_of = [&](uint64_t total) {
    if (task.by_mass) limit = limit_of_mass(fraction, static_cast<double>(total));
    return limit;
  };
  if (!find_bin(s, false, limit_of)) return 0;
  task.first_bin = task.last_bin = s.bin;
  uint64_t before = s.before;
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
    find_bin(s, false, [&](uint64_t) { return limit - before; });
    before += s.before;
    task.high -= static_cast<uint64_t>(s.bin) << task.shift;
    const uint64_t width = uint64_t{1} << task.shift;
    if (task.high - task.low >= width) task.low = task.high - width + 1;
    fits = s.number[s.bin] <= kCapacity;
  }
  task.action = Sweep::Action::list;
  sweep(s, row, first_id, task);
  sort_words(s, s.count);
  return border_in_list(s, task, before, limit);
}

}  // namespace radix::gpu
