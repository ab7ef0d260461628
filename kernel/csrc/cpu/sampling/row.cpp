// One row of logits: the draw, cut into segments of fixed size for the pool. Inside of a pool's thread the segments run
// one after the other, with the same result. Bound by the passes over the row (bytes) and, for a draw without filters,
// by Philox (20 multiplications for 4 ids), whose words a bound passes over unless their id may win.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "common/philox.h"
#include "cpu/sampling/order.h"
#include "cpu/sampling/sampling.h"
#include "cpu/thread_pool.h"

namespace radix::cpu {
namespace {

constexpr float kInf = __builtin_inff();
constexpr float kLn2 = 0.693147181f;
constexpr int64_t kSegment = 16384;  // a multiple of the 32 ids of a word of a mask

int64_t segments(int64_t n) {
  return (n + kSegment - 1) / kSegment;
}

// The part of a mask for the ids from `begin` on.
const uint32_t* words_from(const uint32_t* allowed, int64_t begin) {
  return allowed ? allowed + begin / 32 : nullptr;
}

// Calls fn(segment, begin, end) for the segments of [0, n).
template <class Fn>
void each_segment(int64_t n, const Fn& fn) {
  parallel_for(segments(n), 1, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; s++) fn(s, s * kSegment, std::min(n, (s + 1) * kSegment));
  });
}

// A buffer of the calling thread that lives until its next use; fn's threads share it by pointer.
template <class T, int Use>
T* scratch(size_t size) {
  static thread_local std::vector<T> memory;
  if (memory.size() < size) memory.resize(size);
  return memory.data();
}

float noise(uint32_t word) {
  return -std::log(-std::log1p(-philox_uniform(word)));
}

// At least noise(word): -log(E) <= -log(u), and u >= 2^-(leading zeros + 1). With some room for rounding.
float noise_bound(uint32_t word) {
  const int zeros = word == 0 ? 32 : __builtin_clz(word);
  return static_cast<float>(zeros + 1) * kLn2 + 1e-3f;
}

struct Best {
  float score = -kInf;
  int32_t id = -1;

  void offer(float other, int32_t other_id) {
    if (other_id >= 0 && (other > score || (other == score && other_id < id) || id < 0)) {
      score = other;
      id = other_id;
    }
  }
};

// The row's settings, and x: logits / temperature, which the filters may change.
struct Draw {
  float* x;
  int64_t n;
  const RowSettings& s;

  PhiloxBlock words(int64_t id) const {
    return philox(s.key.seed, static_cast<uint32_t>(id / 4), s.key.position, s.key.stream, 0);
  }
};

Best draw_segment(const Draw& d, int64_t begin, int64_t end) {
  Best best;
  DrawBatch batch;
  for (int64_t at = begin; sampling_kernels().next_batch(d.x, at, end, d.s.key, best.score, &batch);
       at = batch.first + batch.count) {
    for (int64_t i = 0; i < std::min(batch.count, end - batch.first); i++) {
      const int64_t id = batch.first + i;
      if (d.x[id] == -kInf || d.x[id] + noise_bound(batch.words[i]) < best.score) continue;
      best.offer(d.x[id] + noise(batch.words[i]), static_cast<int32_t>(id));
    }
  }
  return best;
}

int32_t draw_all(const Draw& d) {
  Best* parts = scratch<Best, 0>(segments(d.n));
  each_segment(d.n, [&](int64_t s, int64_t begin, int64_t end) { parts[s] = draw_segment(d, begin, end); });
  Best best;
  for (int64_t s = 0; s < segments(d.n); s++) best.offer(parts[s].score, parts[s].id);
  return best.id;
}

int32_t draw_among(const Draw& d, const std::vector<int32_t>& ids, size_t count) {
  Best best;
  for (size_t i = 0; i < count; i++) best.offer(d.x[ids[i]] + noise(d.words(ids[i]).word[ids[i] % 4]), ids[i]);
  return best.id;
}

// The first allowed id of this value, the row's largest, right after row_max: whose segments' maxima say where it is.
int32_t first_largest(const float* x, const uint32_t* allowed, int64_t n, float largest) {
  const float* parts = scratch<float, 3>(segments(n));
  for (int64_t s = 0; s < segments(n); s++) {
    if (parts[s] != largest) continue;
    const int64_t begin = s * kSegment, count = std::min(n - begin, kSegment);
    const int64_t at = sampling_kernels().find(x + begin, words_from(allowed, begin), largest, count);
    if (at < count) return static_cast<int32_t>(begin + at);
  }
  return -1;
}

// How many of the ids (in order, the best `ids.size()` of the row) survive: `limit` by top-k, then top-p, then min-p.
// 0 when the list is too short to tell.
size_t survivors(const Draw& d, const std::vector<int32_t>& ids, size_t limit, double mass) {
  const double top = d.x[ids[0]];
  double before = 0;
  for (size_t i = 0; i < std::min(ids.size(), limit); i++) {
    const double p = std::exp(static_cast<double>(d.x[ids[i]]) - top);
    const bool enough = d.s.top_p < 1 && before >= static_cast<double>(d.s.top_p) * mass;
    if (i > 0 && (enough || p < static_cast<double>(d.s.min_p) || p == 0)) return i;
    before += p;
  }
  return ids.size() < limit ? 0 : limit;
}

// The sum of p[i] over the x[i] that reach `least`, in a fixed order.
double sum_from(const float* x, const float* p, int64_t n, float least) {
  constexpr int kLanes = 8;
  double lane[kLanes] = {}, sum = 0;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; j++) lane[j] += static_cast<double>(x[i + j] >= least ? p[i + j] : 0.f);
  for (; i < n; i++) sum += static_cast<double>(x[i] >= least ? p[i] : 0.f);
  for (double part : lane) sum += part;
  return sum;
}

// The mass of the ids that stand before id `last`.
double mass_before(const Draw& d, float top, int32_t last) {
  double* parts = scratch<double, 1>(segments(d.n));
  each_segment(d.n, [&](int64_t s, int64_t begin, int64_t end) {
    float* p = scratch<float, 2>(kSegment);
    sampling_kernels().exp(d.x + begin, top, p, end - begin);
    const int64_t middle = std::clamp<int64_t>(last, begin, end);  // equals stand before it up to here
    parts[s] = sum_from(d.x + begin, p, middle - begin, d.x[last]) +
               sum_from(d.x + middle, p + (middle - begin), end - middle, std::nextafter(d.x[last], kInf));
  });
  double sum = 0;
  for (int64_t s = 0; s < segments(d.n); s++) sum += parts[s];
  return sum;
}

// Makes -inf of all ids but those that stand before id `last`.
void keep_before(const Draw& d, int32_t last) {
  const float value = d.x[last];
  each_segment(d.n, [&](int64_t, int64_t begin, int64_t end) {
    const int64_t middle = std::clamp<int64_t>(last, begin, end);
    for (int64_t i = begin; i < middle; i++) d.x[i] = d.x[i] >= value ? d.x[i] : -kInf;
    for (int64_t i = middle; i < end; i++) d.x[i] = d.x[i] > value ? d.x[i] : -kInf;
  });
}

// Top-p and min-p over a row of which many ids survive. The border of top-p is not looked for: the best score of all is
// that of the survivors if its id is one of them, as it is with a probability of top_p or more; and if it is not, they
// all stand before it.
int32_t draw_by_proposals(const Draw& d, float top, double mass) {
  const auto min_p = static_cast<double>(d.s.min_p);
  if (min_p > 0)
    each_segment(d.n, [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        if (std::exp(static_cast<double>(d.x[i]) - static_cast<double>(top)) < min_p) d.x[i] = -kInf;
    });
  for (;;) {
    const int32_t id = draw_all(d);
    if (!(d.s.top_p < 1) || id < 0) return id;
    const double before = mass_before(d, top, id);
    if (before == 0 || before < static_cast<double>(d.s.top_p) * mass) return id;
    keep_before(d, id);
  }
}

// Without top-k most rows keep few ids: look at a few, in order, and at the whole row only when they do not suffice.
int32_t draw_filtered(const Draw& d, float top, int64_t top_k) {
  static thread_local std::vector<int32_t> ids;
  constexpr int64_t kFew = 128;
  const bool by_count = top_k > 0 && top_k < d.n;
  const int64_t limit = by_count ? top_k : d.n;
  row_first_ids(d.x, d.n, by_count ? limit : std::min(limit, kFew), ids);
  double mass = 0;
  if (by_count) {  // top-p is of the mass that top-k leaves
    for (int32_t id : ids) mass += std::exp(static_cast<double>(d.x[id]) - static_cast<double>(top));
  } else {
    mass = row_sum_exp(d.x, top, d.n);
  }
  if (const size_t kept = survivors(d, ids, static_cast<size_t>(limit), mass)) return draw_among(d, ids, kept);
  return draw_by_proposals(d, top, mass);
}

}  // namespace

float row_max(const float* x, const uint32_t* allowed, int64_t n) {
  if (n == 0) return -kInf;
  float* parts = scratch<float, 3>(segments(n));
  each_segment(n, [&](int64_t s, int64_t begin, int64_t end) {
    parts[s] = sampling_kernels().max(x + begin, words_from(allowed, begin), end - begin);
  });
  float top = parts[0];
  for (int64_t s = 1; s < segments(n); s++)
    if (!(parts[s] <= top)) top = top != top ? top : parts[s];
  return top;
}

double row_sum_exp(const float* x, float shift, int64_t n) {
  double* parts = scratch<double, 4>(segments(n));
  each_segment(n, [&](int64_t s, int64_t begin, int64_t end) {
    parts[s] = sampling_kernels().sum_exp(x + begin, shift, end - begin);
  });
  double sum = 0;
  for (int64_t s = 0; s < segments(n); s++) sum += parts[s];
  return sum;
}

void row_first_ids(const float* x, int64_t n, int64_t count, std::vector<int32_t>& ids) {
  if (count * 16 > kSegment || segments(n) < 2) return first_ids(x, n, count, ids);
  int32_t* parts = scratch<int32_t, 5>(static_cast<size_t>(segments(n) * count));
  each_segment(n, [&](int64_t s, int64_t begin, int64_t end) {
    static thread_local std::vector<int32_t> mine;
    first_ids(x + begin, end - begin, count, mine);
    for (int64_t i = 0; i < count; i++)
      parts[s * count + i] = i < static_cast<int64_t>(mine.size()) ? static_cast<int32_t>(begin) + mine[i] : -1;
  });
  ids.clear();
  for (int64_t i = 0; i < segments(n) * count; i++)
    if (parts[i] >= 0) ids.push_back(parts[i]);
  std::partial_sort(ids.begin(), ids.begin() + count, ids.end(), ByValue{x});
  ids.resize(count);
}

int32_t draw_row(const float* logits, const uint32_t* allowed, int64_t n, const RowSettings& s) {
  const float largest = row_max(logits, allowed, n);
  if (!std::isfinite(largest)) return -1;
  // Infinity would make NaN of the ids that may not be drawn.
  const float temperature = std::min(s.temperature, FLT_MAX);
  if (!(temperature >= FLT_MIN) || !std::isfinite(largest / temperature))
    return first_largest(logits, allowed, n, largest);
  float* x = scratch<float, 6>(n);
  each_segment(n, [&](int64_t, int64_t begin, int64_t end) {
    sampling_kernels().divide(logits + begin, words_from(allowed, begin), temperature, x + begin, end - begin);
  });
  const Draw draw{x, n, s};
  const bool top_k = s.top_k > 0 && s.top_k < n;
  if (!top_k && s.top_p >= 1 && s.min_p <= 0) return draw_all(draw);
  return draw_filtered(draw, largest / temperature, s.top_k);
}

}  // namespace radix::cpu
