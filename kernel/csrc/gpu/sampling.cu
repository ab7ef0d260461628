// Penalties and the draw on the GPU, a block of 1024 threads a row. A greedy or unfiltered row is read twice; a filter
// adds a dozen passes, all of them in L2 for a row of a real vocabulary.
#include "api/sampling.h"
#include "common/philox.h"
#include "common/tensor.h"
#include "gpu/element.h"
#include "gpu/launch.h"
#include "gpu/select.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int kThreads = kSelectThreads;
constexpr int kPointwiseThreads = 256;
constexpr int32_t kInPrompt = 1 << 30;

struct Matrix {
  char* data;
  int64_t stride, rows, columns;  // stride in elements

  explicit Matrix(const rk_tensor& t)
      : data(data_ptr<char>(t)), stride(t.strides[0]), rows(t.shape[0]), columns(t.shape[1]) {}
  template <class T>
  __device__ T* row(int64_t i) const {
    return reinterpret_cast<T*>(data) + i * stride;
  }
};

struct Settings {
  const float *temperature, *top_p, *min_p;
  const int32_t* top_k;
  const int64_t *seed, *position;
  uint32_t stream;

  __device__ bool has_top_k(int64_t row, int64_t n) const { return top_k[row] > 0 && top_k[row] < n; }
};

// A candidate: the better of two has the larger score, or the lower id.
struct Candidate {
  float score;
  int32_t id;  // -1: none
};
struct Better {
  __device__ Candidate operator()(Candidate a, Candidate b) const {
    if (b.id < 0) return a;
    if (a.id < 0) return b;
    return b.score > a.score || (b.score == a.score && b.id < a.id) ? b : a;
  }
};
__device__ inline Candidate shuffle_xor(Candidate c, int mask) {
  return {gpu::shuffle_xor(c.score, mask), gpu::shuffle_xor(c.id, mask)};
}

__device__ inline float noise(uint32_t word) {
  return -logf(-log1pf(-philox_uniform(word)));
}

// Scaled probability of x against the row's largest, as an integer of 2^-40.
__device__ inline uint64_t fixed_mass(float x, float largest) {
  return static_cast<uint64_t>(static_cast<double>(expf(x - largest)) * 0x1p40);
}

template <class Keep>
__device__ Candidate draw(const float* logits, int64_t n, float temperature, const Settings& s, int64_t b,
                          const Keep& keep) {
  Candidate best{0.f, -1};
  for (int64_t block = threadIdx.x; block * 4 < n; block += kThreads) {
    const PhiloxBlock words = philox(static_cast<uint64_t>(s.seed[b]), static_cast<uint32_t>(block),
                                     static_cast<uint32_t>(s.position[b]), s.stream, 0);
    for (int i = 0; i < 4 && block * 4 + i < n; i++) {
      const int64_t id = block * 4 + i;
      const float x = logits[id] / temperature;
      if (x == -INFINITY || !keep(id, x)) continue;
      best = Better()(best, {x + noise(words.word[i]), static_cast<int32_t>(id)});
    }
  }
  return block_reduce<kThreads>(best, Better());
}

__device__ Candidate draw_filtered(const float* logits, int64_t n, float temperature, float largest, const Settings& s,
                                   int64_t b) {
  Border by_k, by_p;
  if (s.has_top_k(b, n))
    by_k = find_border(logits, n, temperature, static_cast<uint64_t>(s.top_k[b]),
                       [](int64_t, uint32_t, float) { return uint64_t{1}; });
  if (s.top_p[b] < 1) {
    const auto mass = [&](int64_t id, uint32_t key, float scaled) {
      return by_k.keeps(key, id) ? fixed_mass(scaled, largest) : 0;
    };
    uint64_t total = 0;
    for_each_id(logits, n, [&](int64_t id, float value) {
      const float scaled = value / temperature;
      total += mass(id, order_key(scaled), scaled);
    });
    total = block_reduce<kThreads>(total, Sum());
    const double limit = static_cast<double>(s.top_p[b]) * static_cast<double>(total);
    by_p = find_border(logits, n, temperature, limit < 1 ? 1 : static_cast<uint64_t>(ceil(limit)), mass);
  }
  const float min_p = s.min_p[b];
  return draw(logits, n, temperature, s, b, [&](int64_t id, float x) {
    const uint32_t key = order_key(x);
    return by_k.keeps(key, id) && by_p.keeps(key, id) && (min_p <= 0 || expf(x - largest) >= min_p);
  });
}

__global__ void __launch_bounds__(kThreads) sampling_kernel(Matrix logits_matrix, Settings s, int32_t* out) {
  const int64_t b = blockIdx.x, n = logits_matrix.columns;
  const float* logits = logits_matrix.row<const float>(b);
  float largest = -INFINITY;
  int bad = 0;
  for_each_id(logits, n, [&](int64_t, float value) {
    largest = fmaxf(largest, value);
    bad |= isnan(value);
  });
  largest = block_reduce<kThreads>(largest, Max());
  bad = block_reduce<kThreads>(bad, Sum());
  if (bad || !isfinite(largest)) {
    if (threadIdx.x == 0) out[b] = -1;
    return;
  }
  const float temperature = s.temperature[b];
  Candidate best{0.f, -1};
  if (!(temperature > 0) || !isfinite(largest / temperature)) {
    for_each_id(logits, n, [&](int64_t id, float value) { best = Better()(best, {value, static_cast<int32_t>(id)}); });
    best = block_reduce<kThreads>(best, Better());
  } else if (!s.has_top_k(b, n) && s.top_p[b] >= 1 && s.min_p[b] <= 0) {
    best = draw(logits, n, temperature, s, b, [](int64_t, float) { return true; });
  } else {
    best = draw_filtered(logits, n, temperature, largest / temperature, s, b);
  }
  if (threadIdx.x == 0) out[b] = best.id;
}

__global__ void __launch_bounds__(kPointwiseThreads)
    penalties_kernel(Matrix logits, Matrix counts, const int32_t* slots, const float* repetition,
                     const float* frequency, const float* presence) {
  for (int64_t b = blockIdx.y; b < logits.rows; b += gridDim.y) {
    const int64_t slot = slots[b];
    if (slot < 0 || slot >= counts.rows) continue;
    float* x = logits.row<float>(b);
    const int32_t* words = counts.row<const int32_t>(slot);
    for (int64_t i = int64_t{blockIdx.x} * kPointwiseThreads + threadIdx.x; i < logits.columns;
         i += int64_t{gridDim.x} * kPointwiseThreads) {
      if (words[i] == 0) continue;
      float y = x[i] > 0 ? x[i] / repetition[b] : x[i] * repetition[b];
      const int32_t count = words[i] & (kInPrompt - 1);
      if (count > 0) y -= frequency[b] * static_cast<float>(count) + presence[b];
      x[i] = y;
    }
  }
}

__global__ void __launch_bounds__(kPointwiseThreads)
    count_kernel(Matrix counts, const int32_t* slots, const int32_t* ids, int64_t rows) {
  const int64_t b = int64_t{blockIdx.x} * kPointwiseThreads + threadIdx.x;
  if (b >= rows || slots[b] < 0 || slots[b] >= counts.rows || ids[b] < 0 || ids[b] >= counts.columns) return;
  atomicAdd(counts.row<int32_t>(slots[b]) + ids[b], 1);
}

}  // namespace

namespace backend {

void apply_penalties(const rk_apply_penalties_args& args, rk_stream stream) {
  const Matrix logits(*args.logits), counts(*args.counts);
  constexpr int64_t kMostRows = 65535;  // a grid has no more in y
  const dim3 grid(blocks_for(logits.columns, kPointwiseThreads * 8, 256), blocks_for(logits.rows, 1, kMostRows));
  launch("apply_penalties_inplace", args.logits->device, stream, penalties_kernel, grid, kPointwiseThreads, logits,
         counts, static_cast<const int32_t*>(data_ptr<int32_t>(*args.slots)),
         static_cast<const float*>(data_ptr<float>(*args.repetition)),
         static_cast<const float*>(data_ptr<float>(*args.frequency)),
         static_cast<const float*>(data_ptr<float>(*args.presence)));
}

void count_tokens(const rk_count_tokens_args& args, rk_stream stream) {
  const int64_t rows = args.ids->shape[0];
  launch("count_tokens_inplace", args.counts->device, stream, count_kernel, blocks_for(rows, kPointwiseThreads),
         kPointwiseThreads, Matrix(*args.counts), static_cast<const int32_t*>(data_ptr<int32_t>(*args.slots)),
         static_cast<const int32_t*>(data_ptr<int32_t>(*args.ids)), rows);
}

void top_k_top_p_sampling(const rk_top_k_top_p_sampling_args& args, rk_stream stream) {
  const Settings s{data_ptr<float>(*args.temperature),
                   data_ptr<float>(*args.top_p),
                   data_ptr<float>(*args.min_p),
                   data_ptr<int32_t>(*args.top_k),
                   data_ptr<int64_t>(*args.seed),
                   data_ptr<int64_t>(*args.position),
                   args.draw_stream};
  const Matrix logits(*args.logits);
  launch("top_k_top_p_sampling", args.logits->device, stream, sampling_kernel, static_cast<unsigned>(logits.rows),
         kThreads, logits, s, data_ptr<int32_t>(*args.out));
}

}  // namespace backend
}  // namespace radix
