// Penalties and the draw on the CPU, a row a thread. Bound by the passes over the row (bytes) and, for a draw without
// filters, by Philox (20 multiplications for 4 ids).
#include "api/sampling.h"

#include <cmath>

#include "common/philox.h"
#include "common/tensor.h"
#include "cpu/sampling/order.h"
#include "cpu/sampling/sampling.h"
#include "cpu/thread_pool.h"

namespace radix {
namespace {

using namespace cpu;

constexpr int32_t kInPrompt = 1 << 30;
constexpr float kLn2 = 0.693147181f;
constexpr float kInf = __builtin_inff();

// The row's settings, and x: logits / temperature.
struct Draw {
  const float* x;
  int64_t n;
  uint64_t seed;
  uint32_t position, stream;
};

float noise(uint32_t word) {
  return -std::log(-std::log1p(-philox_uniform(word)));
}

// At least noise(word): -log(E) <= -log(u), and u >= 2^-(leading zeros + 1). With some room for rounding.
float noise_bound(uint32_t word) {
  const int zeros = word == 0 ? 32 : __builtin_clz(word);
  return static_cast<float>(zeros + 1) * kLn2 + 1e-3f;
}

class Best {
 public:
  void offer(float score, int32_t id) {
    if (score > score_ || (score == score_ && id < id_) || id_ < 0) {
      score_ = score;
      id_ = id;
    }
  }
  float score() const { return score_; }
  int32_t id() const { return id_; }

 private:
  float score_ = -kInf;
  int32_t id_ = -1;
};

int32_t draw_all(const Draw& d) {
  Best best;
  for (int64_t first = 0; first < d.n; first += 4) {
    const int64_t lanes = std::min<int64_t>(4, d.n - first);
    const PhiloxBlock block = philox(d.seed, static_cast<uint32_t>(first / 4), d.position, d.stream, 0);
    for (int64_t i = 0; i < lanes; i++) {
      const float x = d.x[first + i];
      if (x == -kInf || x + noise_bound(block.word[i]) < best.score()) continue;
      best.offer(x + noise(block.word[i]), static_cast<int32_t>(first + i));
    }
  }
  return best.id();
}

int32_t draw_among(const Draw& d, const std::vector<int32_t>& ids, size_t count) {
  Best best;
  for (size_t i = 0; i < count; i++) {
    const auto id = static_cast<uint32_t>(ids[i]);
    const PhiloxBlock block = philox(d.seed, id / 4, d.position, d.stream, 0);
    best.offer(d.x[id] + noise(block.word[id % 4]), ids[i]);
  }
  return best.id();
}

int32_t first_equal(const float* x, int64_t n, float value) {
  for (int64_t i = 0; i < n; i++)
    if (x[i] == value) return static_cast<int32_t>(i);
  return -1;
}

// How many of the ids (in order, the best `ids.size()` of the row) survive: `limit` by top-k, then top-p, then min-p.
// 0 when the list is too short to tell.
size_t survivors(const Draw& d, const std::vector<int32_t>& ids, size_t limit, double mass, float top_p, float min_p) {
  const double top = d.x[ids[0]];
  double before = 0;
  for (size_t i = 0; i < std::min(ids.size(), limit); i++) {
    const double p = std::exp(static_cast<double>(d.x[ids[i]]) - top);
    const bool enough = top_p < 1 && before >= static_cast<double>(top_p) * mass;
    if (i > 0 && (enough || p < static_cast<double>(min_p) || p == 0)) return i;
    before += p;
  }
  return ids.size() < limit ? 0 : limit;
}

int32_t draw_filtered(const Draw& d, int32_t top_k, float top_p, float min_p) {
  static thread_local std::vector<int32_t> ids;
  const int64_t limit = top_k > 0 ? std::min<int64_t>(top_k, d.n) : d.n;
  // Top-p is of the mass that top-k leaves, so all of its ids must be at hand. Without top-k most rows keep few ids:
  // look at a few and take more only when they do not suffice.
  for (int64_t count = limit < d.n ? limit : std::min<int64_t>(limit, 128);; count = std::min(limit, count * 16)) {
    first_ids(d.x, d.n, count, ids);
    double mass = 0;
    if (limit == d.n) {
      mass = sampling_kernels().sum_exp(d.x, d.x[ids[0]], d.n);
    } else {
      for (int32_t id : ids) mass += std::exp(static_cast<double>(d.x[id]) - static_cast<double>(d.x[ids[0]]));
    }
    if (const size_t kept = survivors(d, ids, static_cast<size_t>(limit), mass, top_p, min_p))
      return draw_among(d, ids, kept);
  }
}

struct Settings {
  const float *temperature, *top_p, *min_p;
  const int32_t* top_k;
  const int64_t *seed, *position;
};

int32_t sample_row(const float* logits, int64_t n, const Settings& s, int64_t b, uint32_t stream) {
  static thread_local std::vector<float> scaled;
  const float largest = n > 0 ? sampling_kernels().max(logits, n) : -kInf;
  if (!std::isfinite(largest)) return -1;
  const float temperature = s.temperature[b];
  if (!(temperature > 0) || !std::isfinite(largest / temperature)) return first_equal(logits, n, largest);
  scaled.resize(n);
  sampling_kernels().divide(logits, temperature, scaled.data(), n);
  const Draw draw{scaled.data(), n, static_cast<uint64_t>(s.seed[b]), static_cast<uint32_t>(s.position[b]), stream};
  const bool top_k = s.top_k[b] > 0 && s.top_k[b] < n;
  if (!top_k && s.top_p[b] >= 1 && s.min_p[b] <= 0) return draw_all(draw);
  return draw_filtered(draw, top_k ? s.top_k[b] : 0, s.top_p[b], s.min_p[b]);
}

// Rows of a [.., V] tensor of 4-byte words.
template <class T>
T* row_of(const rk_tensor& t, int64_t row) {
  return data_ptr<T>(t) + row * t.strides[0];
}

// counts: the row's words. See apply_penalties.
void penalise(float* x, const int32_t* counts, int64_t n, float repetition, float frequency, float presence) {
  for (int64_t i = 0; i < n; i++) {
    if (counts[i] == 0) continue;
    x[i] = x[i] > 0 ? x[i] / repetition : x[i] * repetition;
    const int32_t count = counts[i] & (kInPrompt - 1);
    if (count > 0) x[i] -= frequency * static_cast<float>(count) + presence;
  }
}

void check_slots(const char* op, const rk_tensor& slots, const rk_tensor& counts) {
  const int32_t* slot = data_ptr<int32_t>(slots);
  for (int64_t b = 0; b < slots.shape[0]; b++)
    if (slot[b] < -1 || slot[b] >= counts.shape[0])
      fail(RK_INVALID, "%s: slots[%lld] is %d, expected -1 to %lld (rows of counts)", op, (long long)b, slot[b],
           (long long)counts.shape[0] - 1);
}

bool edits_logits(const rk_top_k_top_p_sampling_args& a) {
  return a.bias_ids || a.counts || a.stop_ids || a.bitmask;
}

// A row's list of ids [M], ended by a negative one; ids past the vocabulary are skipped.
template <class Fn>
void for_each_listed(const rk_tensor& lists, int64_t b, int64_t n, const Fn& fn) {
  const int64_t count = lists.shape[1];
  const int32_t* ids = data_ptr<int32_t>(lists) + b * count;
  for (int64_t i = 0; i < count && ids[i] >= 0; i++)
    if (ids[i] < n) fn(ids[i], b * count + i);
}

// A copy of row b with bias, penalties, minimum of tokens and grammar applied, in this thread's memory.
const float* edited_row(const rk_top_k_top_p_sampling_args& a, int64_t b) {
  static thread_local std::vector<float> edited;
  const float* logits = row_of<const float>(*a.logits, b);
  const int64_t n = a.logits->shape[1];
  edited.assign(logits, logits + n);
  float* x = edited.data();
  if (a.bias_ids)
    for_each_listed(*a.bias_ids, b, n, [&](int32_t id, int64_t at) { x[id] += data_ptr<float>(*a.bias_values)[at]; });
  if (a.counts) {
    const int32_t slot = data_ptr<int32_t>(*a.slots)[b];
    if (slot >= 0)
      penalise(x, row_of<int32_t>(*a.counts, slot), n, data_ptr<float>(*a.repetition)[b],
               data_ptr<float>(*a.frequency)[b], data_ptr<float>(*a.presence)[b]);
  }
  if (a.stop_ids && data_ptr<int64_t>(*a.position)[b] < data_ptr<int64_t>(*a.min_position)[b])
    for_each_listed(*a.stop_ids, b, n, [&](int32_t id, int64_t) { x[id] = -kInf; });
  if (a.bitmask) {
    const uint32_t* words = row_of<const uint32_t>(*a.bitmask, b);
    for (int64_t i = 0; i < n; i++)
      if (!(words[i / 32] >> (i % 32) & 1u)) x[i] = -kInf;
  }
  return x;
}

}  // namespace

namespace backend {

int64_t sampling_workspace_size(int64_t, int64_t) {
  return 0;
}

void apply_penalties(const rk_apply_penalties_args& args, rk_stream) {
  check_slots("apply_penalties_inplace", *args.slots, *args.counts);
  const int64_t n = args.logits->shape[1];
  const int32_t* slots = data_ptr<int32_t>(*args.slots);
  const float* repetition = data_ptr<float>(*args.repetition);
  const float* frequency = data_ptr<float>(*args.frequency);
  const float* presence = data_ptr<float>(*args.presence);
  parallel_for(args.logits->shape[0], 1, [&](int64_t begin, int64_t end) noexcept {
    for (int64_t b = begin; b < end; b++) {
      if (slots[b] >= 0)
        penalise(row_of<float>(*args.logits, b), row_of<int32_t>(*args.counts, slots[b]), n, repetition[b],
                 frequency[b], presence[b]);
    }
  });
}

void count_tokens(const rk_count_tokens_args& args, rk_stream) {
  check_slots("count_tokens_inplace", *args.slots, *args.counts);
  const int32_t* slots = data_ptr<int32_t>(*args.slots);
  const int32_t* ids = data_ptr<int32_t>(*args.ids);
  const int64_t rows = args.slots->shape[0], n = args.counts->shape[1];
  for (int64_t b = 0; b < rows; b++)
    if (ids[b] < -1 || ids[b] >= n)
      fail(RK_INVALID, "count_tokens_inplace: ids[%lld] is %d, expected -1 to %lld (columns of counts)", (long long)b,
           ids[b], (long long)n - 1);
  for (int64_t b = 0; b < rows; b++)
    if (slots[b] >= 0 && ids[b] >= 0) row_of<int32_t>(*args.counts, slots[b])[ids[b]]++;
}

void top_k_top_p_sampling(const rk_top_k_top_p_sampling_args& args, rk_stream) {
  const Settings s{data_ptr<float>(*args.temperature), data_ptr<float>(*args.top_p),
                   data_ptr<float>(*args.min_p),       data_ptr<int32_t>(*args.top_k),
                   data_ptr<int64_t>(*args.seed),      data_ptr<int64_t>(*args.position)};
  if (args.counts) check_slots("top_k_top_p_sampling", *args.slots, *args.counts);
  const bool edits = edits_logits(args);
  const int64_t n = args.logits->shape[1], top_n = args.logprob ? args.top_ids->shape[1] : 0;
  int32_t* out = data_ptr<int32_t>(*args.out);
  parallel_for(args.logits->shape[0], 1, [&](int64_t begin, int64_t end) noexcept {
    for (int64_t b = begin; b < end; b++) {
      const float* logits = row_of<const float>(*args.logits, b);
      out[b] = sample_row(edits ? edited_row(args, b) : logits, n, s, b, args.draw_stream);
      if (args.logprob)
        row_logprobs(logits, n, out[b], top_n, data_ptr<float>(*args.logprob) + b,
                     data_ptr<float>(*args.top_logprobs) + b * top_n, data_ptr<int32_t>(*args.top_ids) + b * top_n);
    }
  });
}

}  // namespace backend
}  // namespace radix
